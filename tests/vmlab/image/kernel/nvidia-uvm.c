// SPDX-License-Identifier: GPL-2.0
/*
 * Stand-in of nvidia-uvm.ko: a character device whose major the kernel chooses, minors 0 and 1.
 *
 * Parameter `major`: this one instead, so that a test can have a boot with another major.
 */
#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>

void nv_lab_anchor(void);

static int major;
module_param(major, int, 0444);

static dev_t first;
static struct cdev nodes;

static int uvm_open(struct inode *inode, struct file *file)
{
	return 0;
}

static const struct file_operations node_operations = {
	.owner = THIS_MODULE,
	.open = uvm_open,
};

static int __init uvm_init(void)
{
	int error;

	nv_lab_anchor();
	if (major) {
		first = MKDEV(major, 0);
		error = register_chrdev_region(first, 2, "nvidia-uvm");
	} else {
		error = alloc_chrdev_region(&first, 0, 2, "nvidia-uvm");
	}
	if (error)
		return error;
	cdev_init(&nodes, &node_operations);
	error = cdev_add(&nodes, first, 2);
	if (error)
		unregister_chrdev_region(first, 2);
	return error;
}

static void __exit uvm_exit(void)
{
	cdev_del(&nodes);
	unregister_chrdev_region(first, 2);
}

module_init(uvm_init);
module_exit(uvm_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(LAB_VERSION);
