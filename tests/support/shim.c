// Stands between a program and its disk (LD_PRELOAD): the k-th call on anything under one folder fails, kills the process, or is slow.
//
//   SHIM_UNDER=/folder      the calls that count are those on files under it
//   SHIM_AT=k               the call it happens at, from 1; 0 or nothing: none
//   SHIM_ERRNO=n            what that call fails with; nothing: the process gets a signal there
//   SHIM_SIGNAL=n           which one; nothing: SIGKILL
//   SHIM_FOREVER=1          every call from the k-th on fails, as on a disk that is full or gone
//   SHIM_COUNT=/file        how many calls there were and, one a line, which: written at the end
//   SHIM_NO_EXCHANGE=1      renameat2 does not know RENAME_EXCHANGE, as on NFS
//   SHIM_SLOW=n             every such call takes n microseconds more
//   SHIM_CLOCK=1            the time of day jumps between calls, forward and back by up to years
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FILES 4096
static atomic_char under[FILES]; // is this open file under the folder?
static atomic_long calls;
static FILE *names;

static const char *setting(const char *name) {
  const char *value = getenv(name);
  return value && *value ? value : NULL;
}

static long number(const char *name) {
  const char *value = setting(name);
  return value ? atol(value) : 0;
}

__attribute__((constructor)) static void begin(void) {
  if (setting("SHIM_COUNT")) names = tmpfile();
}

__attribute__((destructor)) static void end(void) {
  const char *path = setting("SHIM_COUNT");
  if (!path || !names) return;
  FILE *out = fopen(path, "w");
  if (!out) return;
  fprintf(out, "%ld\n", atomic_load(&calls));
  rewind(names);
  for (int c; (c = fgetc(names)) != EOF;) fputc(c, out);
  fclose(out);
}

static int inside(int folder, const char *path) {
  const char *root = setting("SHIM_UNDER");
  if (!root || !path) return 0;
  if (path[0] == '/' || folder == AT_FDCWD) return strncmp(path, root, strlen(root)) == 0;
  return folder >= 0 && folder < FILES && under[folder];
}

static int open_inside(int file) { return file >= 0 && file < FILES && under[file]; }

// Counts a call. 0: it may happen. -1: it fails, errno is set.
static int fault(const char *what, const char *path) {
  long now = atomic_fetch_add(&calls, 1) + 1, at = number("SHIM_AT");
  if (names) fprintf(names, "%s %s\n", what, path ? path : "");
  if (setting("SHIM_SLOW")) usleep((useconds_t)number("SHIM_SLOW"));
  if (at == 0 || (setting("SHIM_FOREVER") ? now < at : now != at)) return 0;
  if (!setting("SHIM_ERRNO")) {
    kill(getpid(), setting("SHIM_SIGNAL") ? (int)number("SHIM_SIGNAL") : SIGKILL);
    return 0;
  }
  errno = (int)number("SHIM_ERRNO");
  return -1;
}

#define REAL(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

static int remember(int file, int counts) {
  if (file >= 0 && file < FILES) under[file] = (char)counts;
  return file;
}

#define OPEN(name)                                                            \
  int name(const char *path, int flags, ...) {                                \
    va_list list;                                                             \
    va_start(list, flags);                                                    \
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(list, mode_t) : 0; \
    va_end(list);                                                             \
    int counts = inside(AT_FDCWD, path);                                      \
    if (counts && fault("open", path)) return -1;                             \
    return remember(REAL(int, name, const char *, int, ...)(path, flags, mode), counts); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                          \
  int name(int folder, const char *path, int flags, ...) {                    \
    va_list list;                                                             \
    va_start(list, flags);                                                    \
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(list, mode_t) : 0; \
    va_end(list);                                                             \
    int counts = inside(folder, path);                                        \
    if (counts && fault("openat", path)) return -1;                           \
    return remember(REAL(int, name, int, const char *, int, ...)(folder, path, flags, mode), counts); \
  }
OPENAT(openat)
OPENAT(openat64)

int close(int file) {
  remember(file, 0);
  return REAL(int, close, int)(file);
}

ssize_t read(int file, void *to, size_t count) {
  if (open_inside(file) && fault("read", NULL)) return -1;
  return REAL(ssize_t, read, int, void *, size_t)(file, to, count);
}

ssize_t write(int file, const void *from, size_t count) {
  if (open_inside(file) && fault("write", NULL)) return -1;
  return REAL(ssize_t, write, int, const void *, size_t)(file, from, count);
}

int fsync(int file) {
  if (open_inside(file) && fault("fsync", NULL)) return -1;
  return REAL(int, fsync, int)(file);
}

int fdatasync(int file) {
  if (open_inside(file) && fault("fdatasync", NULL)) return -1;
  return REAL(int, fdatasync, int)(file);
}

int ftruncate64(int file, off64_t length) {
  if (open_inside(file) && fault("ftruncate", NULL)) return -1;
  return REAL(int, ftruncate64, int, off64_t)(file, length);
}

int rename(const char *from, const char *to) {
  if (inside(AT_FDCWD, to) && fault("rename", to)) return -1;
  return REAL(int, rename, const char *, const char *)(from, to);
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  if (inside(b, to) && fault("renameat2", to)) return -1;
  if (setting("SHIM_NO_EXCHANGE")) {
    errno = EINVAL;
    return -1;
  }
  return REAL(int, renameat2, int, const char *, int, const char *, unsigned)(a, from, b, to, flags);
}

int mkdir(const char *path, mode_t mode) {
  if (inside(AT_FDCWD, path) && fault("mkdir", path)) return -1;
  return REAL(int, mkdir, const char *, mode_t)(path, mode);
}

int rmdir(const char *path) {
  if (inside(AT_FDCWD, path) && fault("rmdir", path)) return -1;
  return REAL(int, rmdir, const char *)(path);
}

int unlink(const char *path) {
  if (inside(AT_FDCWD, path) && fault("unlink", path)) return -1;
  return REAL(int, unlink, const char *)(path);
}

int unlinkat(int folder, const char *path, int flags) {
  if (inside(folder, path) && fault("unlinkat", path)) return -1;
  return REAL(int, unlinkat, int, const char *, int)(folder, path, flags);
}

int symlink(const char *target, const char *path) {
  if (inside(AT_FDCWD, path) && fault("symlink", path)) return -1;
  return REAL(int, symlink, const char *, const char *)(target, path);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int done = REAL(int, clock_gettime, clockid_t, struct timespec *)(clock, now);
  if (done == 0 && clock == CLOCK_REALTIME && setting("SHIM_CLOCK")) {
    static atomic_ulong state = 1;
    unsigned long x = atomic_load(&state) * 6364136223846793005ul + 1442695040888963407ul;
    atomic_store(&state, x);
    now->tv_sec += (long)(x >> 33) % 600000000 - 300000000; // ten years to either side
  }
  return done;
}
