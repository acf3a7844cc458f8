// SPDX-License-Identifier: GPL-2.0
/*
 * Stand-in of nvidia.ko: what a deployer can see of the real one, and nothing of its work.
 *
 *   loading    fails with ENODEV when no GPU was left to probe, and says which driver has them
 *   nodes      major 195: minor N is GPU N, 255 is nvidiactl; none is made in /dev
 *   procfs     /proc/driver/nvidia/version and gpus/BDF/information
 *   unbinding  waits, uninterruptibly, until the last opener of the GPU has closed it
 *   unloading  refused while a node is open
 *
 * Parameter `stuck`: the wait of an unbind that met an opener does not end with the close (as with
 * the open modules 595 to 610), until 0 is written to it.
 */
#include <linux/cdev.h>
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#define NV_MAJOR 195
#define NV_CTL 255
#define NV_MAX 16

static bool stuck;
module_param(stuck, bool, 0644);
MODULE_PARM_DESC(stuck, "an unbind that met an opener never ends");

struct nv_gpu {
	struct pci_dev *pci;
	struct proc_dir_entry *folder;
	int openers;
	bool leaving;
};

static struct nv_gpu table[NV_MAX];	/* index: device minor */
static DEFINE_MUTEX(table_lock);
static int probed;
static struct proc_dir_entry *top, *top_gpus;
static struct cdev nodes;

static int version_show(struct seq_file *out, void *unused)
{
	seq_puts(out, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " LAB_VERSION
		 "  Release Build  (lab@vmlab)  Wed Jan  7 06:36:06 UTC 2026\n"
		 "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)\n");
	return 0;
}

static int information_show(struct seq_file *out, void *unused)
{
	struct nv_gpu *gpu = out->private;

	seq_printf(out, "Model: \t\t NVIDIA RTX A6000\nIRQ:   \t\t %d\n", gpu->pci->irq);
	seq_printf(out, "GPU UUID: \t GPU-6f0c1a52-%04x-4a5e-9d3c-0a6000000001\n",
		   gpu->pci->bus->number << 8);
	seq_puts(out, "Video BIOS: \t 94.02.5c.00.02\nBus Type: \t PCIe\n"
		 "DMA Size: \t 47 bits\nDMA Mask: \t 0x7fffffffffff\n");
	seq_printf(out, "Bus Location: \t %s\nDevice Minor: \t %d\n", pci_name(gpu->pci),
		   (int)(gpu - table));
	seq_puts(out, "GPU Firmware: \t " LAB_VERSION "\nGPU Excluded:\t No\n");
	return 0;
}

static int nv_open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);
	int error = 0;

	if (minor == NV_CTL)
		return 0;
	if (minor >= NV_MAX)
		return -ENODEV;
	mutex_lock(&table_lock);
	if (!table[minor].pci || table[minor].leaving)
		error = -ENODEV;
	else
		table[minor].openers++;
	mutex_unlock(&table_lock);
	return error;
}

static int nv_release(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);

	if (minor == NV_CTL)
		return 0;
	mutex_lock(&table_lock);
	table[minor].openers--;
	mutex_unlock(&table_lock);
	return 0;
}

static const struct file_operations node_operations = {
	.owner = THIS_MODULE,
	.open = nv_open,
	.release = nv_release,
};

static int nv_probe(struct pci_dev *pci, const struct pci_device_id *id)
{
	struct nv_gpu *gpu = NULL;
	int minor;

	mutex_lock(&table_lock);
	for (minor = 0; minor < NV_MAX && !gpu; minor++)
		if (!table[minor].pci)
			gpu = &table[minor];
	if (gpu) {
		*gpu = (struct nv_gpu){ .pci = pci };
		pci_set_drvdata(pci, gpu);
		probed++;
	}
	mutex_unlock(&table_lock);
	if (!gpu)
		return -ENOMEM;
	gpu->folder = proc_mkdir(pci_name(pci), top_gpus);
	if (gpu->folder)
		proc_create_single_data("information", 0444, gpu->folder, information_show, gpu);
	return 0;
}

static int openers_of(struct nv_gpu *gpu)
{
	int count;

	mutex_lock(&table_lock);
	gpu->leaving = true;
	count = gpu->openers;
	mutex_unlock(&table_lock);
	return count;
}

static void nv_remove(struct pci_dev *pci)
{
	struct nv_gpu *gpu = pci_get_drvdata(pci);

	if (openers_of(gpu)) {
		pr_err("NVRM: Attempting to remove device %s with non-zero usage count!\n",
		       pci_name(pci));
		while (openers_of(gpu) || READ_ONCE(stuck))
			msleep(50);
		pr_err("NVRM: Continuing with GPU removal for device %s\n", pci_name(pci));
	}
	proc_remove(gpu->folder);
	mutex_lock(&table_lock);
	gpu->pci = NULL;
	probed--;
	mutex_unlock(&table_lock);
}

static const struct pci_device_id nv_ids[] = {
	{ PCI_DEVICE(0x10de, PCI_ANY_ID), .class = 0x030000, .class_mask = 0xff0000 },
	{ }
};
MODULE_DEVICE_TABLE(pci, nv_ids);

static struct pci_driver nv_driver = {
	.name = "nvidia",
	.id_table = nv_ids,
	.probe = nv_probe,
	.remove = nv_remove,
};

/* Why nothing was probed, in the words of the real module. */
static void tell_missing(void)
{
	struct pci_dev *pci = NULL;
	int missing = 0;

	while ((pci = pci_get_device(0x10de, PCI_ANY_ID, pci))) {
		if (pci->class >> 16 != 0x03)
			continue;
		missing++;
		if (pci->dev.driver)
			pr_err("NVRM: GPU %s is already bound to %s.\n", pci_name(pci),
			       pci->dev.driver->name);
	}
	pr_err("NVRM: The NVIDIA probe routine was not called for %d device(s).\n", missing);
	pr_err("NVRM: No NVIDIA devices probed.\n");
}

static int __init nv_init(void)
{
	dev_t first = MKDEV(NV_MAJOR, 0);
	int error;

	top = proc_mkdir("driver/nvidia", NULL);
	if (!top)
		return -ENOMEM;
	top_gpus = proc_mkdir("gpus", top);
	proc_create_single("version", 0444, top, version_show);
	error = register_chrdev_region(first, 256, "nvidia");
	if (error)
		goto no_region;
	cdev_init(&nodes, &node_operations);
	error = cdev_add(&nodes, first, 256);
	if (error)
		goto no_nodes;
	error = pci_register_driver(&nv_driver);
	if (error)
		goto no_driver;
	if (probed) {
		pr_info("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  " LAB_VERSION
			"  Release Build  (lab@vmlab)\n");
		return 0;
	}
	tell_missing();
	pci_unregister_driver(&nv_driver);
	error = -ENODEV;
no_driver:
	cdev_del(&nodes);
no_nodes:
	unregister_chrdev_region(first, 256);
no_region:
	proc_remove(top);
	return error;
}

static void __exit nv_exit(void)
{
	pci_unregister_driver(&nv_driver);
	cdev_del(&nodes);
	unregister_chrdev_region(MKDEV(NV_MAJOR, 0), 256);
	proc_remove(top);
}

/* nvidia-uvm depends on this module through it. */
void nv_lab_anchor(void);
void nv_lab_anchor(void)
{
}
EXPORT_SYMBOL(nv_lab_anchor);

module_init(nv_init);
module_exit(nv_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(LAB_VERSION);
