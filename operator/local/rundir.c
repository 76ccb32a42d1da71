#include "operator/local/rundir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"

void op_rundir_path(const struct op_rundir *dir, const char *name, char out[OP_PATH_MAX])
{
    snprintf(out, OP_PATH_MAX, "%s/%s", dir->path, name);
}

static enum dl_rc errno_to_rc(int number)
{
    switch (number) {
    case EACCES:
    case EPERM:
    case EROFS: return DL_EDENIED;
    case ENOENT:
    case ENOTDIR: return DL_ENOTFOUND;
    case EEXIST: return DL_EEXISTS;
    case ENOSPC:
    case EDQUOT: return DL_EFULL;
    default: return DL_EIO;
    }
}

/* --- making it --- */

static enum dl_rc make_folder(const char *path, struct dl_err *err)
{
    if (mkdir(path, 0777) != 0 && errno != EEXIST) {
        return dl_err_errno(err, errno_to_rc(errno), errno, "make the folder %s (choose another with --dir)", path);
    }
    return DL_OK;
}

static bool is_empty_folder(const char *path)
{
    DIR *folder = opendir(path);
    if (folder == NULL) {
        return false;
    }
    int entries = 0;
    while (readdir(folder) != NULL) {
        entries++;
    }
    closedir(folder);
    return entries <= 2; /* "." and ".." */
}

static enum dl_rc make_wanted(const char *wanted, struct dl_err *err)
{
    if (mkdir(wanted, 0777) == 0) {
        return DL_OK;
    }
    int number = errno;
    if (number == EEXIST && is_empty_folder(wanted)) {
        return access(wanted, W_OK | X_OK) == 0
                   ? DL_OK
                   : dl_err_errno(err, DL_EDENIED, errno, "write to the run folder %s (choose another with --dir)",
                                  wanted);
    }
    if (number == EEXIST) {
        return dl_err_set(err, DL_EEXISTS,
                          "the run folder %s is there already and is not empty: choose another with --dir", wanted);
    }
    return dl_err_errno(err, errno_to_rc(number), number, "make the run folder %s (choose another with --dir)", wanted);
}

/* Number after "<job>-" in a folder's name; 0 when it is none. */
static uint32_t run_number(const char *name, const char *job)
{
    size_t length = strlen(job);
    if (strncmp(name, job, length) != 0 || name[length] != '-') {
        return 0;
    }
    char *end = NULL;
    unsigned long number = strtoul(name + length + 1, &end, 10);
    return end == name + length + 1 || *end != 0 || number >= OP_RUNDIR_NUMBER_MAX ? 0 : (uint32_t)number;
}

static enum dl_rc make_numbered(const char *job, char out[OP_PATH_MAX], struct dl_err *err)
{
    enum dl_rc rc = make_folder("runs", err);
    if (rc != DL_OK) {
        return rc;
    }
    uint32_t next = 1;
    DIR *folder = opendir("runs");
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
        next = DL_MAX(next, run_number(entry->d_name, job) + 1);
    }
    if (folder != NULL) {
        closedir(folder);
    }
    for (; next < OP_RUNDIR_NUMBER_MAX; next++) {
        snprintf(out, OP_PATH_MAX, "runs/%s-%u", job, next);
        if (mkdir(out, 0777) == 0) {
            return DL_OK;
        }
        if (errno != EEXIST) {
            return dl_err_errno(err, errno_to_rc(errno), errno, "make the run folder %s (choose another with --dir)",
                                out);
        }
    }
    return dl_err_set(err, DL_EEXISTS, "runs/%s-1 to -%d are all taken: remove some", job, OP_RUNDIR_NUMBER_MAX);
}

static enum dl_rc resolve(const char *path, struct op_rundir *out, struct dl_err *err)
{
    char resolved[PATH_MAX];
    if (realpath(path, resolved) == NULL) {
        return dl_err_errno(err, errno_to_rc(errno), errno, "find the run folder %s", path);
    }
    if (strlen(resolved) >= sizeof out->path) {
        return dl_err_set(err, DL_EINVAL, "the run folder's path is longer than %zu bytes: %.80s...", sizeof out->path,
                          resolved);
    }
    snprintf(out->path, sizeof out->path, "%.*s", (int)sizeof out->path - 1, resolved);
    return DL_OK;
}

static enum dl_rc make_folders(const struct op_rundir *out, uint32_t shards, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    static const char *const folders[] = {"logs", "ports", "state", "cache"};
    char path[OP_PATH_MAX];
    for (size_t i = 0; rc == DL_OK && i < DL_COUNT_OF(folders); i++) {
        op_rundir_path(out, folders[i], path);
        rc = make_folder(path, err);
    }
    for (uint32_t i = 0; rc == DL_OK && i < shards; i++) {
        char name[32];
        snprintf(name, sizeof name, "state/shard-%u", i);
        op_rundir_path(out, name, path);
        rc = make_folder(path, err);
    }
    return rc;
}

enum dl_rc op_rundir_create(const char *wanted, const char *job, uint32_t shards, struct op_rundir *out,
                            struct dl_err *err)
{
    char numbered[OP_PATH_MAX];
    enum dl_rc rc = wanted != NULL ? make_wanted(wanted, err) : make_numbered(job, numbered, err);
    if (rc == DL_OK) {
        rc = resolve(wanted != NULL ? wanted : numbered, out, err);
    }
    return rc == DL_OK ? make_folders(out, shards, err) : rc;
}

enum dl_rc op_rundir_resume(const char *wanted, uint32_t shards, struct op_rundir *out, struct dl_err *err)
{
    static const char *const needed[] = {"job.json", "token", "state"};
    char path[OP_PATH_MAX];
    enum dl_rc rc = resolve(wanted, out, err);
    for (size_t i = 0; rc == DL_OK && i < DL_COUNT_OF(needed); i++) {
        op_rundir_path(out, needed[i], path);
        if (access(path, R_OK) != 0) {
            rc = dl_err_errno(err, DL_ENOTFOUND, errno, "resume %s: it holds no run, %s cannot be read", out->path,
                              needed[i]);
        }
    }
    return rc == DL_OK ? make_folders(out, shards, err) : rc;
}

enum dl_rc op_rundir_lock(const struct op_rundir *dir, int *fd, struct dl_err *err)
{
    *fd = open(dir->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*fd >= 0 && flock(*fd, LOCK_EX | LOCK_NB) == 0) {
        return DL_OK;
    }
    int number = errno;
    return number == EWOULDBLOCK
               ? dl_err_set(err, DL_EEXISTS, "the run in %s is under way: stop it first (`diloco stop`)", dir->path)
               : dl_err_errno(err, errno_to_rc(number), number, "lock the run folder %s", dir->path);
}

enum dl_rc op_rundir_open(const char *wanted, struct op_rundir *out, struct dl_err *err)
{
    if (wanted != NULL) {
        return resolve(wanted, out, err);
    }
    char newest[OP_PATH_MAX] = "";
    struct timespec latest = {0};
    DIR *folder = opendir("runs");
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
        char path[OP_PATH_MAX];
        snprintf(path, sizeof path, "runs/%s/job.json", entry->d_name);
        struct stat info;
        if (entry->d_name[0] == '.' || stat(path, &info) != 0) {
            continue;
        }
        bool is_later = info.st_mtim.tv_sec > latest.tv_sec ||
                        (info.st_mtim.tv_sec == latest.tv_sec && info.st_mtim.tv_nsec > latest.tv_nsec);
        if (newest[0] == 0 || is_later) {
            latest = info.st_mtim;
            snprintf(newest, sizeof newest, "runs/%s", entry->d_name);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    if (newest[0] == 0) {
        return dl_err_set(err, DL_ENOTFOUND,
                          "no run below ./runs: name a run folder, or start one with `diloco run JOB`");
    }
    return resolve(newest, out, err);
}

/* --- files --- */

enum dl_rc op_rundir_write(const struct op_rundir *dir, const char *name, const char *text, mode_t mode,
                           struct dl_err *err)
{
    char path[OP_PATH_MAX], temporary[OP_PATH_MAX];
    char temporary_name[64];
    snprintf(temporary_name, sizeof temporary_name, ".%s.new", name);
    op_rundir_path(dir, name, path);
    op_rundir_path(dir, temporary_name, temporary);
    DL_AUTO_FD int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
    if (fd < 0) {
        return dl_err_errno(err, errno_to_rc(errno), errno, "write %s", path);
    }
    size_t size = strlen(text), done = 0;
    while (done < size) {
        ssize_t written = write(fd, text + done, size - done);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written < 0) {
            return dl_err_errno(err, errno_to_rc(errno), errno, "write %s", path);
        }
        done += (size_t)written;
    }
    if (rename(temporary, path) != 0) {
        return dl_err_errno(err, errno_to_rc(errno), errno, "write %s", path);
    }
    return DL_OK;
}

enum dl_rc op_file_read(const char *path, size_t most, char **out, size_t *size, struct dl_err *err)
{
    DL_AUTO_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        return dl_err_errno(err, errno_to_rc(errno), errno, "read %s", path);
    }
    if ((uint64_t)info.st_size > most) {
        return dl_err_set(err, DL_EINVAL, "read %s: %lld bytes, at most %zu are read", path, (long long)info.st_size,
                          most);
    }
    size_t capacity = (size_t)info.st_size;
    DL_AUTO_FREE char *text = malloc(capacity + 1);
    if (text == NULL) {
        return dl_err_set(err, DL_ENOMEM, "read %s: no memory for %zu bytes", path, capacity);
    }
    size_t used = 0;
    while (used < capacity) {
        ssize_t got = read(fd, text + used, capacity - used);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return dl_err_errno(err, errno_to_rc(errno), errno, "read %s", path);
        }
        if (got == 0) {
            break;
        }
        used += (size_t)got;
    }
    text[used] = 0;
    *size = used;
    *out = dl_take(text);
    return DL_OK;
}

enum dl_rc op_rundir_make_token(const struct op_rundir *dir, struct dl_err *err)
{
    unsigned char secret[32];
    char text[2 * sizeof secret + 2];
    if (getrandom(secret, sizeof secret, 0) != (ssize_t)sizeof secret) {
        return dl_err_errno(err, DL_EIO, errno, "draw a token");
    }
    for (size_t i = 0; i < sizeof secret; i++) {
        snprintf(text + 2 * i, 3, "%02x", secret[i]);
    }
    snprintf(text + 2 * sizeof secret, 2, "\n");
    return op_rundir_write(dir, "token", text, 0600, err);
}

enum dl_rc op_rundir_read_token(const struct op_rundir *dir, char token[OP_TOKEN_BYTES_MAX], struct dl_err *err)
{
    char path[OP_PATH_MAX];
    DL_AUTO_FREE char *text = NULL;
    size_t size = 0;
    op_rundir_path(dir, "token", path);
    enum dl_rc rc = op_file_read(path, OP_TOKEN_BYTES_MAX - 1, &text, &size, err);
    if (rc == DL_OK) {
        snprintf(token, OP_TOKEN_BYTES_MAX, "%.*s", (int)strcspn(text, "\r\n"), text);
    }
    return rc;
}

/* --- logs --- */

void op_log_bound(const char *path, int64_t most)
{
    struct stat info;
    DL_AUTO_FD int from = open(path, O_RDWR | O_CLOEXEC);
    if (from < 0 || fstat(from, &info) != 0 || info.st_size <= most) {
        return;
    }
    char older[OP_PATH_MAX + 8];
    snprintf(older, sizeof older, "%s.1", path);
    DL_AUTO_FD int to = open(older, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    off_t offset = 0;
    while (to >= 0 && offset < info.st_size && sendfile(to, from, &offset, (size_t)(info.st_size - offset)) > 0) {
    }
    /* The writer appends, so that it goes on at the new end. Cannot fail in a way that anyone could act on. */
    int result = ftruncate(from, 0);
    (void)result;
}

static void copy_line(const char *line, size_t length, char *out, size_t out_bytes)
{
    snprintf(out, out_bytes, "%.*s", (int)DL_MIN(length, out_bytes - 1), line);
}

void op_log_last_complaint(const char *path, char *out, size_t out_bytes)
{
    enum { TAIL = 16 * 1024 };
    char tail[TAIL + 1];
    out[0] = 0;
    DL_AUTO_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return;
    }
    off_t size = lseek(fd, 0, SEEK_END);
    off_t from = size > TAIL ? size - TAIL : 0;
    ssize_t got = pread(fd, tail, TAIL, from);
    if (got <= 0) {
        return;
    }
    tail[got] = 0;
    char *save = NULL;
    bool has_complaint = false;
    for (char *line = strtok_r(tail, "\n", &save); line != NULL; line = strtok_r(NULL, "\n", &save)) {
        bool is_complaint = strstr(line, " error ") != NULL || strstr(line, " warn ") != NULL;
        if (is_complaint || !has_complaint) {
            copy_line(line, strlen(line), out, out_bytes);
        }
        has_complaint = has_complaint || is_complaint;
    }
}

void op_rundir_clear_cache(const struct op_rundir *dir)
{
    char path[OP_PATH_MAX];
    op_rundir_path(dir, "cache", path);
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder != NULL && (entry = readdir(folder)) != NULL;) {
        (void)unlinkat(dirfd(folder), entry->d_name, 0); /* "." and ".." are no files. */
    }
    if (folder != NULL) {
        closedir(folder);
    }
    (void)rmdir(path);
}
