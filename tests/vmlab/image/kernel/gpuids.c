// SPDX-License-Identifier: GPL-2.0
/*
 * Gives QEMU's devices the ids of an RTX A6000 and of its audio function, before any driver binds.
 *
 * QEMU cannot emulate a device of vendor 10de. The kernel matches drivers by, and sysfs shows, the
 * ids that it read when it found the device; this changes those and nothing else.
 */
#include <linux/module.h>
#include <linux/pci.h>

static void relabel(u16 vendor, u16 device, u16 to, u32 class)
{
	struct pci_dev *pci = NULL;

	while ((pci = pci_get_device(vendor, device, pci))) {
		pci->vendor = 0x10de;
		pci->device = to;
		pci->class = class;
		pci->subsystem_vendor = 0x10de;
		pci->subsystem_device = 0x1459;
	}
}

static int __init gpuids_init(void)
{
	/* 3D controller: as a VGA device it would have to be known to the VGA arbiter. */
	relabel(0x1234, 0x1111, 0x2230, 0x030200);
	relabel(0x8086, 0x2668, 0x1aef, 0x040300);
	return 0;
}

module_init(gpuids_init);
MODULE_LICENSE("GPL");
