// A preload library that plays tt-kmd and a Blackhole card for one process: open, ioctl, mmap, munmap and close of
// /dev/tenstorrent/0, as tt-kmd 2.10 answers them (ioctl.h, memory.c, tlb.c, blackhole.c). DRAM bank b is the file
// $KMD_BANKS/bank-b of 4 GiB. At the process's end it reports, by exit status 66, what was left open and what was
// closed in an order in which a NIC could still have written, or the driver would have refused.
//
// KMD_MAJOR, KMD_MINOR                      of the version, 2 and 10; the patch is 1
// KMD_DEVICE    PCI device, "b140"
// KMD_BIG       4 GiB windows that BAR4 has room for, 8
// KMD_TAKEN_BIG, KMD_TAKEN_SMALL            windows that some other process holds, 0
// KMD_FAIL      "export=95@1,allocate=12@3": a call's first or third time fails with that errno; calls are open, info,
//               version, allocate, allocate_big, allocate_small, configure, export, free, mmap
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SMALL = 202, WINDOWS = 210, FDS = 4096, MAPPINGS = 512, BANKS = 8, REGISTERS = 0x1000 };
static const uint64_t MIB_2 = 2ull << 20, GIB_4 = 4ull << 30, BAR0 = 1ull << 29;
static const uint64_t TLB_UC = 6ull << 36, TLB_WC = 7ull << 36, REGISTERS_AT = 0x1FC00000;

struct config {
    uint64_t addr;
    uint16_t x_end, y_end, x_start, y_start;
    uint8_t noc, mcast, ordering, linked, static_vc, reserved[11];
};
_Static_assert(sizeof(struct config) == 32, "configuration");
struct info { uint32_t room, size; uint16_t vendor, device, sub_vendor, sub_device, bdf, dma, domain, reserved; };
_Static_assert(sizeof(struct info) == 24, "GET_DEVICE_INFO");
struct version { uint32_t room, size, api; uint8_t major, minor, patch, reserved; };
_Static_assert(sizeof(struct version) == 16, "GET_DRIVER_INFO");
struct allocate { uint64_t size, reserved; uint32_t id, reserved_id; uint64_t uc, wc, reserved_out; };
_Static_assert(sizeof(struct allocate) == 48, "ALLOCATE_TLB");
struct configure { uint32_t id, reserved; struct config config; uint64_t out; };
_Static_assert(sizeof(struct configure) == 48, "CONFIGURE_TLB");
struct export { uint32_t argsz, flags, id; int32_t fd; uint64_t offset, size; };
_Static_assert(sizeof(struct export) == 32, "EXPORT_TLB_DMABUF");

// owner: descriptor + 1, 0 for none, -1 for another process. A window is free when nobody owns and nothing exports it.
static struct { int owner, exports, mapped, configured; struct config config; } windows[WINDOWS];
// A device (open), or an export (of window_p1 - 1), which NICs may have imported.
static struct { int open, window_p1, imports; uint64_t offset, size; } files[FDS];
static struct { char *at; size_t length; int window; } mappings[MAPPINGS];
static int banks[BANKS], registers = -1, violations, big;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static void violation(const char *what, int id) {
    fprintf(stderr, "kmd_shim: %s (%d)\n", what, id);
    violations++;
}

static struct { char name[32]; int times; } calls[16];

static void start(void) {
    if (registers < 0) {
        registers = memfd_create("registers", MFD_CLOEXEC);
        if (registers < 0 || ftruncate(registers, REGISTERS)) abort();
        for (int b = 0; b < BANKS; b++) {
            char path[4096];
            snprintf(path, sizeof path, "%s/bank-%d", getenv("KMD_BANKS"), b);
            banks[b] = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
            if (banks[b] < 0 || ftruncate(banks[b], GIB_4)) abort();
        }
    }
    for (int fd = 0; fd < FDS; fd++)
        if (files[fd].open || files[fd].window_p1) return;
    // Nobody has it open: the environment says anew what the card is like.
    memset(calls, 0, sizeof calls);
    memset(windows, 0, sizeof windows);
    big = number("KMD_BIG", 8);
    windows[SMALL - 1].owner = -1;  // the kernel's own
    for (int i = 0; i < number("KMD_TAKEN_SMALL", 0); i++) windows[i].owner = -1;
    for (int i = 0; i < number("KMD_TAKEN_BIG", 0); i++) windows[SMALL + i].owner = -1;
}

// Whether the call that KMD_FAIL names is to fail now; then errno is set.
static int fails(const char *call) {
    const char *list = getenv("KMD_FAIL");
    int times = 0;
    for (int i = 0; i < 16; i++) {
        if (!calls[i].name[0]) snprintf(calls[i].name, sizeof calls[i].name, "%s", call);
        if (!strcmp(calls[i].name, call)) { times = ++calls[i].times; break; }
    }
    for (const char *at = list; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        size_t n = strlen(call);
        if (strncmp(at, call, n) || at[n] != '=') continue;
        char *end;
        int code = strtol(at + n + 1, &end, 10);
        if (*end == '@' && times == atoi(end + 1)) { errno = code; return 1; }
    }
    return 0;
}

static int refuse(int code) { errno = code; return -1; }
static uint64_t size_of(int id) { return id < SMALL ? MIB_2 : GIB_4; }
static uint64_t in_bar(int id) { return id < SMALL ? id * MIB_2 : BAR0 + (id - SMALL) * GIB_4; }
static int is_free(int id) { return !windows[id].owner && !windows[id].exports; }
static int owned(int fd, uint32_t id) { return id < WINDOWS && windows[id].owner == fd + 1; }

// The bank behind a node: x 17 has banks 0 to 3, x 18 banks 4 to 7, three ports each from y 12 (tt-umd, no harvesting).
static int bank_of(const struct config *c) {
    int x = c->x_end - 17, y = c->y_end - 12;
    return x < 0 || x > 1 || y < 0 || y >= 12 ? -1 : 4 * x + y / 3;
}

static int allocate(int fd, struct allocate *a) {
    int large = a->size == GIB_4;
    if (fails("allocate") || fails(large ? "allocate_big" : "allocate_small")) return -1;
    if ((!large && a->size != MIB_2) || (large && !big)) return refuse(EINVAL);
    for (int id = large ? SMALL : 0; id < (large ? SMALL + big : SMALL); id++) {
        if (!is_free(id)) continue;
        windows[id].owner = fd + 1;
        windows[id].configured = 0;
        a->id = id;
        a->uc = TLB_UC + in_bar(id);
        a->wc = TLB_WC + in_bar(id);
        return 0;
    }
    return refuse(ENOMEM);
}

static int configure(int fd, const struct configure *c) {
    if (fails("configure")) return -1;
    if (c->id >= 256) return refuse(EINVAL);
    if (!owned(fd, c->id)) return refuse(EPERM);
    if (c->config.addr % size_of(c->id)) return refuse(EINVAL);
    if (c->config.x_start || c->config.y_start || c->config.noc || c->config.mcast || c->config.linked ||
        c->config.static_vc)
        violation("configured with more than a node of NOC 0 and an order", c->id);
    if (windows[c->id].exports) violation("pointed elsewhere while exported", c->id);
    windows[c->id].config = c->config;
    windows[c->id].configured = 1;
    if (c->id >= SMALL) {
        unsigned __int128 value = c->config.addr >> 32;
        value |= (unsigned __int128)(c->config.x_end & 63) << 32 | (unsigned __int128)(c->config.y_end & 63) << 38;
        value |= (unsigned __int128)(c->config.ordering & 3) << 59;
        if (pwrite(registers, &value, 12, c->id * 12) != 12) abort();
    }
    return 0;
}

static int export(int fd, struct export *e) {
    long page = sysconf(_SC_PAGESIZE);
    if (number("KMD_MINOR", 10) < 10) return refuse(EINVAL);  // no such call then
    if (fails("export")) return -1;
    if (e->argsz != sizeof *e || e->flags || e->id >= 256 || e->offset % page || e->size % page) return refuse(EINVAL);
    if (!owned(fd, e->id)) return refuse(EPERM);
    uint64_t size = e->size ? e->size : size_of(e->id) - e->offset;
    if (e->offset >= size_of(e->id) || e->offset + size > size_of(e->id)) return refuse(EINVAL);
    if (!windows[e->id].configured) violation("exported before it was pointed anywhere", e->id);
    int out = memfd_create("dmabuf:", MFD_CLOEXEC);
    if (out < 0) return -1;
    if (out >= FDS || ftruncate(out, size)) abort();
    files[out].window_p1 = e->id + 1;
    files[out].offset = e->offset;
    files[out].size = size;
    windows[e->id].exports++;
    e->fd = out;
    return 0;
}

static int free_window(int fd, uint32_t id) {
    if (fails("free")) return -1;
    if (id >= 256) return refuse(EINVAL);
    if (!owned(fd, id)) return refuse(EPERM);
    if (windows[id].mapped) return refuse(EBUSY);
    if (windows[id].exports) violation("freed while exported", id);  // the driver allows it: the export keeps the window
    windows[id].owner = 0;
    return 0;
}

static int answer(int fd, unsigned long request, void *arg) {
    switch (request) {
    case 0xFA00: {
        struct info *i = arg, full = {i->room, 20, 0x1E52, 0, 0, 0, 0x0100, 28, 0, 0};
        if (fails("info")) return -1;
        full.device = getenv("KMD_DEVICE") ? strtol(getenv("KMD_DEVICE"), NULL, 16) : 0xb140;
        memcpy((char *)arg + 4, (char *)&full + 4, i->room < 20 ? i->room : 20);
        return 0;
    }
    case 0xFA05: {
        struct version *v = arg, full = {v->room, 12, 2, number("KMD_MAJOR", 2), number("KMD_MINOR", 10), 1, 0};
        if (fails("version")) return -1;
        memcpy((char *)arg + 4, (char *)&full + 4, v->room < 12 ? v->room : 12);
        return 0;
    }
    case 0xFA0B: return allocate(fd, arg);
    case 0xFA0C: return free_window(fd, *(uint32_t *)arg);
    case 0xFA0D: return configure(fd, arg);
    case 0xFA10: return export(fd, arg);
    default: return refuse(EINVAL);
    }
}

int ioctl(int fd, unsigned long request, ...) {
    va_list args;
    va_start(args, request);
    void *arg = va_arg(args, void *);
    va_end(args);
    if (fd >= 0 && fd < FDS && files[fd].open) return answer(fd, request, arg);
    return syscall(SYS_ioctl, fd, request, arg);
}

static int open_path(int folder, const char *path, int flags, int mode) {
    if (strncmp(path, "/dev/tenstorrent/", 17)) return syscall(SYS_openat, folder, path, flags, mode);
    start();
    if (fails("open")) return -1;
    if (strcmp(path + 17, "0")) return refuse(ENOENT);
    // A character device, whose size mmap does not look at.
    int fd = syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDWR | (flags & O_CLOEXEC));
    if (fd >= FDS) abort();
    if (fd >= 0) files[fd].open = 1;
    return fd;
}

#define OPEN(name, folder, ...)                                                                                      \
    int name(__VA_ARGS__, int flags, ...) {                                                                          \
        va_list args;                                                                                                \
        va_start(args, flags);                                                                                       \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, int) : 0;                                            \
        va_end(args);                                                                                                \
        return open_path(folder, path, flags, mode);                                                                 \
    }
OPEN(open, AT_FDCWD, const char *path)
OPEN(open64, AT_FDCWD, const char *path)
OPEN(openat, folder, int folder, const char *path)
OPEN(openat64, folder, int folder, const char *path)

static void *map(void *at, size_t length, int protection, int flags, int fd, off_t offset) {
    if (fd < 0 || fd >= FDS || !files[fd].open || flags & MAP_ANONYMOUS)
        return (void *)syscall(SYS_mmap, at, length, protection, flags, fd, offset);
    if (fails("mmap")) return MAP_FAILED;
    if ((uint64_t)offset == REGISTERS_AT && length == REGISTERS)
        return (void *)syscall(SYS_mmap, at, length, protection, flags, registers, 0);
    uint64_t low = (uint64_t)offset >= TLB_WC ? offset - TLB_WC : offset - TLB_UC;
    for (int id = 0; id < WINDOWS; id++) {
        if (in_bar(id) != low) continue;
        if (length > size_of(id)) break;
        if (!owned(fd, id)) return refuse(EPERM), MAP_FAILED;
        int bank = bank_of(&windows[id].config);
        if (!windows[id].configured || bank < 0) {
            violation("mapped while it shows no DRAM bank", id);
            return refuse(EINVAL), MAP_FAILED;
        }
        void *got = (void *)syscall(SYS_mmap, at, length, protection, flags, banks[bank], windows[id].config.addr);
        for (int m = 0; got != MAP_FAILED && m < MAPPINGS; m++) {
            if (mappings[m].at) continue;
            mappings[m].at = got, mappings[m].length = length, mappings[m].window = id;
            windows[id].mapped++;
            return got;
        }
        abort();
    }
    return refuse(EINVAL), MAP_FAILED;
}

void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t o) { return map(at, n, prot, flags, fd, o); }
void *mmap64(void *at, size_t n, int prot, int flags, int fd, off64_t o) { return map(at, n, prot, flags, fd, o); }

int munmap(void *at, size_t length) {
    for (int m = 0; m < MAPPINGS; m++) {
        if (mappings[m].at != at || !at) continue;
        if (mappings[m].length != length) return refuse(EINVAL);  // windows are mapped and unmapped whole
        windows[mappings[m].window].mapped--;
        mappings[m].at = NULL;
    }
    return syscall(SYS_munmap, at, length);
}

int close(int fd) {
    if (fd >= 0 && fd < FDS && files[fd].open) {
        files[fd].open = 0;
        for (int id = 0; id < WINDOWS; id++) {
            if (windows[id].owner != fd + 1) continue;
            violation("still allocated when its device was closed", id);
            windows[id].owner = 0;
        }
    } else if (fd >= 0 && fd < FDS && files[fd].window_p1) {
        if (files[fd].imports) violation("closed while a NIC has it registered", files[fd].window_p1 - 1);
        windows[files[fd].window_p1 - 1].exports--;
        files[fd].window_p1 = files[fd].imports = 0;
    }
    return syscall(SYS_close, fd);
}

// A NIC registers a memory region of a dma-buf, or (by = -1) deregisters it. 0, or an errno.
int kmd_import(int fd, int by) {
    if (fd < 0 || fd >= FDS || !files[fd].window_p1) return EBADF;
    files[fd].imports += by;
    return 0;
}

// What a NIC does with a memory region of a dma-buf: moves bytes to or from wherever the window now points.
// 0, or an errno.
int kmd_dma(int fd, uint64_t offset, void *data, uint64_t length, int write) {
    if (fd < 0 || fd >= FDS || !files[fd].window_p1) return EBADF;
    if (offset + length > files[fd].size) return ERANGE;
    int id = files[fd].window_p1 - 1, bank = bank_of(&windows[id].config);
    if (bank < 0) return EFAULT;
    uint64_t at = windows[id].config.addr + files[fd].offset + offset;
    ssize_t done = write ? pwrite(banks[bank], data, length, at) : pread(banks[bank], data, length, at);
    return done == (ssize_t)length ? 0 : EIO;
}

// How many are there now: open devices, windows that are not free, exports, mappings.
void kmd_counts(int counts[4]) {
    memset(counts, 0, 4 * sizeof *counts);
    for (int fd = 0; fd < FDS; fd++) counts[0] += files[fd].open;
    for (int id = 0; id < WINDOWS; id++) {
        counts[1] += windows[id].owner > 0 || windows[id].exports;
        counts[2] += windows[id].exports;
        counts[3] += windows[id].mapped;
    }
}

// The order that a window was configured with, -1 for none.
int kmd_ordering(int id) { return windows[id].configured ? windows[id].config.ordering : -1; }

__attribute__((destructor)) static void finish(void) {
    int counts[4];
    kmd_counts(counts);
    if (!violations && !counts[0] && !counts[1] && !counts[2] && !counts[3]) return;
    fprintf(stderr, "kmd_shim: left: %d devices, %d windows, %d exports, %d mappings\n", counts[0], counts[1],
            counts[2], counts[3]);
    fflush(NULL);
    _exit(66);
}
