/* Preloaded into a process: counts its calls that write below a folder, and at one of them lets the disk fail.

   What writes in C or Rust is seen as what writes in Python is. A write that meets the fault writes its first half. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

enum { COUNTED, ERROR_ONCE, FULL_FROM_THEN, KILLED };

static char folder[PATH_MAX];
static long calls, chosen;
static int fault = COUNTED, report = -1; /* report: where all calls are named, or the one that meets the fault */

void begin_faults(const char *below, long number, int kind, int file) {
    strcpy(folder, below);
    calls = 0, chosen = number, fault = kind, report = file;
}

static int is_below(char *full, int directory, const char *path) {
    char link[64];
    ssize_t length = 0;
    if (!*folder) return 0;
    if (*path != '/') { /* also an open file, whose path is empty */
        if (directory == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        if ((length = readlink(link, full, PATH_MAX - 1)) < 0) return 0;
    }
    snprintf(full + length, PATH_MAX - length, "%s%s", length && *path ? "/" : "", path);
    return !strncmp(full, folder, strlen(folder));
}

/* Count a call; return whether the disk fails now. A process that is killed here has no time to return. */
static int meets_fault(const char *call, int directory, const char *path, int takes_room) {
    char full[PATH_MAX];
    int before = errno;
    if (!is_below(full, directory, path)) return errno = before, 0;
    long number = __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
    if (number == chosen || fault == COUNTED) dprintf(report, "%s %s\n", call, full + strlen(folder));
    if (number < chosen || (number > chosen && fault != FULL_FROM_THEN)) return errno = before, 0;
    errno = fault == FULL_FROM_THEN ? ENOSPC : EIO;
    return fault == ERROR_ONCE || fault == KILLED || (fault == FULL_FROM_THEN && takes_room);
}

static int fail(void) {
    if (fault == KILLED) kill(getpid(), SIGKILL);
    return -1;
}

static int is_first(void) { return calls - 1 == chosen; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OF_PATH(name, parameters, arguments, directory, path, takes_room)                                              \
    int name parameters {                                                                                              \
        return meets_fault(#name, directory, path, takes_room) ? fail() : REAL(name) arguments;                        \
    }

OF_PATH(rename, (const char *from, const char *to), (from, to), AT_FDCWD, to, 0)
OF_PATH(unlink, (const char *path), (path), AT_FDCWD, path, 0)
OF_PATH(rmdir, (const char *path), (path), AT_FDCWD, path, 0)
OF_PATH(mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, 1)
OF_PATH(link, (const char *from, const char *to), (from, to), AT_FDCWD, to, 1)
OF_PATH(chmod, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, 0)
OF_PATH(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), b, to, 0)
OF_PATH(unlinkat, (int a, const char *path, int how), (a, path, how), a, path, 0)
OF_PATH(mkdirat, (int a, const char *path, mode_t mode), (a, path, mode), a, path, 1)
OF_PATH(linkat, (int a, const char *from, int b, const char *to, int how), (a, from, b, to, how), b, to, 1)
OF_PATH(fsync, (int file), (file), file, "", 1)
OF_PATH(fdatasync, (int file), (file), file, "", 1)
OF_PATH(ftruncate64, (int file, off64_t size), (file, size), file, "", 1)

#define OPENS(name, parameters, arguments, directory)                                                                  \
    int name parameters {                                                                                              \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                        \
        va_end(rest);                                                                                                  \
        int writes = flags & (O_WRONLY | O_RDWR | O_CREAT);                                                            \
        return writes && meets_fault(#name, directory, path, flags & O_CREAT) ? fail() : REAL(name) arguments;         \
    }

OPENS(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPENS(openat, (int directory, const char *path, int flags, ...), (directory, path, flags, mode), directory)
OPENS(openat64, (int directory, const char *path, int flags, ...), (directory, path, flags, mode), directory)

#define WRITES(name, parameters, file, whole, half)                                                                    \
    ssize_t name parameters {                                                                                          \
        if (!meets_fault(#name, file, "", 1)) return REAL(name) whole;                                                 \
        if (fault == ERROR_ONCE || !is_first()) return fail();                                                         \
        ssize_t done = REAL(name) half;                                                                                \
        return fault == KILLED || done < 1 ? fail() : done;                                                            \
    }

WRITES(write, (int file, const void *from, size_t size), file, (file, from, size), (file, from, size / 2))
WRITES(pwrite64, (int file, const void *from, size_t size, off64_t place), file, (file, from, size, place),
       (file, from, size / 2, place))
WRITES(sendfile64, (int to, int file, off64_t *place, size_t size), to, (to, file, place, size),
       (to, file, place, size / 2))
