/* Stands between a program and the file system (LD_PRELOAD). Calls that concern files below one folder are numbered from 1, and can be
   written down, made to fail, cut short, or made the last thing that the process does.

   TORTURE_ROOT   the folder
   TORTURE_LOG    a file to append a record to for each call, with the bytes that were written
   TORTURE_AT     the number of the call that it is about
   TORTURE_DO     "kill" before the call; "tear": half a write, then kill; "short": half a write or read; "fail" with TORTURE_ERRNO
   TORTURE_KINDS  with "fail": every call from then on fails, too, if its letter is among these

   The letters are those of record(). Everything goes straight to the kernel, by calls that all Linux systems have. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST 1024
enum { GO, FAIL, HALF, TEAR };

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static const char *root, *kinds = "";
static int log_fd = -1, action = GO, error_number;
static long at, count;
/* The path that a descriptor was opened with, where it lies below the folder. */
static char *paths[MOST];

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("TORTURE_LOG"), *what = getenv("TORTURE_DO");
    if (text) {
        int fd = syscall(SYS_openat, AT_FDCWD, text, O_WRONLY | O_CREAT | O_APPEND, 0644);
        /* Out of the way: the program's own descriptors keep their numbers. */
        log_fd = fcntl(fd, F_DUPFD_CLOEXEC, MOST - 8);
        syscall(SYS_close, fd);
    }
    if ((text = getenv("TORTURE_AT"))) at = atol(text);
    if ((text = getenv("TORTURE_ERRNO"))) error_number = atoi(text);
    if ((text = getenv("TORTURE_KINDS"))) kinds = text;
    if (what) action = !strcmp(what, "fail") ? FAIL : !strcmp(what, "short") ? HALF : TEAR;
    if (what && !strcmp(what, "kill")) action = GO;
    root = getenv("TORTURE_ROOT");
}

static int below(const char *path) {
    size_t n = root ? strlen(root) : 0;
    return root && path && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

/* An absolute path, or NULL where it is not below the folder. */
static char *resolve(int dir, const char *path, char *buffer) {
    if (!path) return NULL;
    if (path[0] == '/') {
        if (strlen(path) >= PATH_MAX) return NULL;
        strcpy(buffer, path);
    } else {
        const char *base = NULL;
        char here[PATH_MAX];
        if (dir == AT_FDCWD) base = getcwd(here, sizeof here);
        else if (dir >= 0 && dir < MOST) base = paths[dir];
        if (!base || strlen(base) + strlen(path) + 2 > PATH_MAX) return NULL;
        strcpy(buffer, base);
        strcat(buffer, "/");
        strcat(buffer, path);
    }
    return below(buffer) ? buffer : NULL;
}

static const char *path_of(int fd) { return fd >= 0 && fd < MOST ? paths[fd] : NULL; }

static void remember(int fd, const char *path) {
    if (fd < 0 || fd >= MOST) return;
    free(paths[fd]);
    paths[fd] = path ? strdup(path) : NULL;
}

/* Numbers a call and says what it is to do. Does not return where the process is to end before it. */
static int number(char kind) {
    count++;
    if (!at) return GO;
    if (count == at) {
        if (action == GO || (action == TEAR && kind != 'w')) kill(getpid(), SIGKILL);
        if (action == FAIL) errno = error_number;
        return action;
    }
    if (action == FAIL && count > at && strchr(kinds, kind)) {
        errno = error_number;
        return FAIL;
    }
    return GO;
}

/* o open to read   f open a folder   c open to write   r read   w write   t truncate   s sync   m make a folder   n rename   l link   u unlink   d remove a folder
   flags: of c, 1 it is new, 2 it was emptied; of s, 1 a folder. offset: of w, where; of t, the length. */
static void record(char kind, int failed, uint64_t inode, uint64_t offset, uint32_t flags, const char *path, const char *other,
                   const void *data, size_t length) {
    if (log_fd < 0 || failed) return;
    uint32_t sizes[5] = {(uint32_t)count, flags, path ? strlen(path) : 0, other ? strlen(other) : 0, length};
    uint64_t wide[2] = {inode, offset};
    char head[1 + sizeof sizes + sizeof wide] = {kind};
    memcpy(head + 1, wide, sizeof wide);
    memcpy(head + 1 + sizeof wide, sizes, sizeof sizes);
    struct iovec parts[4] = {{head, sizeof head}, {(void *)path, sizes[2]}, {(void *)other, sizes[3]}, {(void *)data, length}};
    int before = errno;
    syscall(SYS_writev, log_fd, parts, 4);
    errno = before;
}

static uint64_t inode_of(int fd, uint32_t *folder, uint64_t *size) {
    struct stat s;
    if (fstat(fd, &s)) return 0;
    if (folder) *folder = S_ISDIR(s.st_mode);
    if (size) *size = s.st_size;
    return s.st_ino;
}

static int open_any(int dir, const char *path, int flags, mode_t mode) {
    char buffer[PATH_MAX];
    pthread_mutex_lock(&lock);
    const char *full = resolve(dir, path, buffer);
    int writes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
    char kind = writes ? 'c' : flags & O_DIRECTORY ? 'f' : 'o';
    int fd = -1;
    if (!full || number(kind) != FAIL) {
        uint32_t new = full && faccessat(AT_FDCWD, full, F_OK, 0);
        fd = syscall(SYS_openat, dir, path, flags, mode);
        remember(fd, full);
        if (full) record(kind, fd < 0, inode_of(fd, NULL, NULL), 0, new | (flags & O_TRUNC ? 2 : 0), full, NULL, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

#define OPEN(NAME) \
    int NAME(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        return open_any(AT_FDCWD, path, flags, mode); \
    }
#define OPENAT(NAME) \
    int NAME(int dir, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = mode_of(flags, rest); \
        va_end(rest); \
        return open_any(dir, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
int creat(const char *path, mode_t mode) { return open_any(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open_any(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

DIR *opendir(const char *path) {
    int fd = open_any(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    return fd < 0 ? NULL : fdopendir(fd);
}

int close(int fd) {
    pthread_mutex_lock(&lock);
    remember(fd, NULL);
    pthread_mutex_unlock(&lock);
    return syscall(SYS_close, fd);
}

static ssize_t write_any(int fd, const void *data, size_t length, int placed, off_t place) {
    pthread_mutex_lock(&lock);
    const char *path = path_of(fd);
    int then = path ? number('w') : GO;
    if (then == HALF || then == TEAR) length = (length + 1) / 2;
    ssize_t done = -1;
    if (then != FAIL) {
        uint64_t size = 0, inode = 0, offset = place;
        if (path) {
            inode = inode_of(fd, NULL, &size);
            int appends = fcntl(fd, F_GETFL) & O_APPEND;
            if (!placed) offset = appends ? size : (uint64_t)syscall(SYS_lseek, fd, 0, SEEK_CUR);
        }
        done = placed ? syscall(SYS_pwrite64, fd, data, length, place) : syscall(SYS_write, fd, data, length);
        if (path) record('w', done < 0, inode, offset, 0, NULL, NULL, data, done < 0 ? 0 : done);
    }
    if (then == TEAR) kill(getpid(), SIGKILL);
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t write(int fd, const void *data, size_t length) { return write_any(fd, data, length, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t place) { return write_any(fd, data, length, 1, place); }
ssize_t pwrite64(int fd, const void *data, size_t length, off_t place) { return write_any(fd, data, length, 1, place); }

ssize_t writev(int fd, const struct iovec *parts, int n) {
    if (!path_of(fd)) return syscall(SYS_writev, fd, parts, n);
    /* The first part alone: whoever writes must cope with less anyway. */
    for (int i = 0; i < n; i++)
        if (parts[i].iov_len) return write_any(fd, parts[i].iov_base, parts[i].iov_len, 0, 0);
    return 0;
}

static ssize_t read_any(int fd, void *data, size_t length, int placed, off_t place) {
    pthread_mutex_lock(&lock);
    int then = path_of(fd) ? number('r') : GO;
    if (path_of(fd)) record('r', 0, 0, 0, 0, path_of(fd), NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    if (then == FAIL) return -1;
    if (then == HALF) length = (length + 1) / 2;
    return placed ? syscall(SYS_pread64, fd, data, length, place) : syscall(SYS_read, fd, data, length);
}

ssize_t read(int fd, void *data, size_t length) { return read_any(fd, data, length, 0, 0); }
ssize_t pread(int fd, void *data, size_t length, off_t place) { return read_any(fd, data, length, 1, place); }
ssize_t pread64(int fd, void *data, size_t length, off_t place) { return read_any(fd, data, length, 1, place); }

/* Copies inside the kernel are refused, so that they are made by reading and writing. */
ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t length, unsigned flags) {
    if (path_of(to)) return errno = ENOSYS, -1;
    return syscall(SYS_copy_file_range, from, from_at, to, to_at, length, flags);
}
ssize_t sendfile(int to, int from, off_t *place, size_t length) {
    if (path_of(to)) return errno = ENOSYS, -1;
    return syscall(SYS_sendfile, to, from, place, length);
}
ssize_t sendfile64(int to, int from, off64_t *place, size_t length) { return sendfile(to, from, (off_t *)place, length); }

static int sync_any(int fd, long call) {
    pthread_mutex_lock(&lock);
    const char *path = path_of(fd);
    int done = -1;
    if (!path || number('s') != FAIL) {
        uint32_t folder = 0;
        uint64_t inode = path ? inode_of(fd, &folder, NULL) : 0;
        done = syscall(call, fd);
        if (path) record('s', done, inode, 0, folder, path, NULL, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return done;
}

int fsync(int fd) { return sync_any(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_any(fd, SYS_fdatasync); }

int ftruncate(int fd, off_t length) {
    pthread_mutex_lock(&lock);
    const char *path = path_of(fd);
    int done = -1;
    if (!path || number('t') != FAIL) {
        done = syscall(SYS_ftruncate, fd, length);
        if (path) record('t', done, inode_of(fd, NULL, NULL), length, 0, path, NULL, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return done;
}
int ftruncate64(int fd, off64_t length) { return ftruncate(fd, length); }

int mkdirat(int dir, const char *path, mode_t mode) {
    char buffer[PATH_MAX];
    pthread_mutex_lock(&lock);
    const char *full = resolve(dir, path, buffer);
    int done = -1;
    if (!full || number('m') != FAIL) {
        done = syscall(SYS_mkdirat, dir, path, mode);
        struct stat s = {0};
        if (full && !done) stat(full, &s);
        if (full) record('m', done, s.st_ino, 0, 0, full, NULL, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return done;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int symlinkat(const char *target, int dir, const char *path) {
    char buffer[PATH_MAX];
    pthread_mutex_lock(&lock);
    const char *full = resolve(dir, path, buffer);
    int done = -1;
    if (!full || number('y') != FAIL) {
        done = syscall(SYS_symlinkat, target, dir, path);
        struct stat s = {0};
        if (full && !done) lstat(full, &s);
        if (full) record('y', done, s.st_ino, 0, 0, full, target, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return done;
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }

int unlinkat(int dir, const char *path, int flags) {
    char buffer[PATH_MAX];
    pthread_mutex_lock(&lock);
    const char *full = resolve(dir, path, buffer);
    char kind = flags & AT_REMOVEDIR ? 'd' : 'u';
    int done = -1;
    if (!full || number(kind) != FAIL) {
        done = syscall(SYS_unlinkat, dir, path, flags);
        if (full) record(kind, done, 0, 0, 0, full, NULL, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return done;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

static int move(char kind, int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    char buffers[2][PATH_MAX];
    pthread_mutex_lock(&lock);
    const char *source = resolve(from_dir, from, buffers[0]), *target = resolve(to_dir, to, buffers[1]);
    int done = -1;
    if (!(source || target) || number(kind) != FAIL) {
        done = kind == 'l' ? syscall(SYS_linkat, from_dir, from, to_dir, to, flags) : syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
        if (source || target) record(kind, done, 0, 0, 0, source, target, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return done;
}
int rename(const char *from, const char *to) { return move('n', AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return move('n', a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { return move('n', a, from, b, to, flags); }
int link(const char *from, const char *to) { return move('l', AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int a, const char *from, int b, const char *to, int flags) { return move('l', a, from, b, to, flags); }
