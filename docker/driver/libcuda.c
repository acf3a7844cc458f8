/* The lab's libcuda.so.1: no libc, a few entry points. cuInit looks at the nodes as CUDA would:
 * 100 no device, 803 module and library differ, 999 the uvm node is missing or stale, 0 good. */
typedef unsigned long u64;
#ifndef VERSION
#define VERSION "580.126.09"
#endif

static long call4(long n, long a, long b, long c, long d) {
    long r;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10)
                     : "rcx", "r11", "memory");
    return r;
}

/* Character device number of `path`, or -1. struct stat: st_mode at 24, st_rdev at 40. */
static long rdev_of(const char *path) {
    char raw[144];
    if (call4(4, (long)path, (long)raw, 0, 0) < 0) return -1;
#ifdef REAL_DRIVER
    /* In the VM lab a driver is behind the nodes: what cannot be opened (O_RDWR) is no device. */
    long fd = call4(2, (long)path, 2, 0, 0);
    if (fd < 0) return -1;
    call4(3, fd, 0, 0, 0);
#endif
    if ((*(unsigned *)(raw + 24) & 0170000) != 0020000) return -1;
    u64 dev = *(u64 *)(raw + 40);
    return (long)((((dev >> 8) & 0xfff) << 20) | (dev & 0xff) | ((dev >> 12) & 0xfff00));
}

static long slurp(const char *path, char *buffer, long size) {
    long fd = call4(2, (long)path, 0, 0, 0), got = 0, n;
    if (fd < 0) return 0;
    while (got < size - 1 && (n = call4(0, fd, (long)(buffer + got), size - 1 - got, 0)) > 0)
        got += n;
    call4(3, fd, 0, 0, 0);
    buffer[got] = 0;
    return got;
}

static const char *find(const char *text, const char *word) {
    for (; *text; text++) {
        const char *a = text, *b = word;
        while (*b && *a == *b) a++, b++;
        if (!*b) return text;
    }
    return 0;
}

static int usable(int minor) {
    char path[] = "/dev/nvidia0";
    path[11] = (char)('0' + minor);
    return rdev_of(path) == (195L << 20 | minor);
}

static int count(void) {
    int n = 0;
    for (int minor = 0; minor < 10; minor++) n += usable(minor);
    return n;
}

int cuInit(unsigned flags) {
    static char text[16384];
    (void)flags;
    if (!slurp("/proc/driver/nvidia/version", text, sizeof text)) return 100;
    if (!find(text, " " VERSION " ")) return 803;
    if (rdev_of("/dev/nvidiactl") != (195L << 20 | 255) || !count()) return 100;
    slurp("/proc/devices", text, sizeof text);
    const char *line = find(text, " nvidia-uvm\n");
    long major = 0, unit = 1;
    if (!line) return 999;
    while (line > text && line[-1] >= '0' && line[-1] <= '9')
        major += (*--line - '0') * unit, unit *= 10;
    return rdev_of("/dev/nvidia-uvm") == major << 20 ? 0 : 999;
}

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = count(); return 0; }
int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= count()) return 101;
    *device = ordinal;
    return 0;
}
int cuDeviceGetName(char *name, int size, int device) {
    const char *text = "NVIDIA RTX A6000";
    int n = 0;
    (void)device;
    for (; n < size - 1 && text[n]; n++) name[n] = text[n];
    if (size > 0) name[n] = 0;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75 ? 8 : attribute == 76 ? 6 : 0;
    return 0;
}
int cuDeviceTotalMem_v2(u64 *bytes, int device) { (void)device; *bytes = 49140UL << 20; return 0; }
int cuGetErrorString(int code, const char **text) {
    *text = code == 0 ? "no error" : code == 100 ? "no CUDA-capable device is detected"
          : code == 803 ? "system has unsupported display driver / cuda driver combination"
          : code == 101 ? "invalid device ordinal" : "unknown error";
    return 0;
}
int nvmlInit_v2(void) { int r = cuInit(0); return r == 0 || r == 999 ? 0 : r == 803 ? 18 : 9; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = (unsigned)count(); return 0; }
