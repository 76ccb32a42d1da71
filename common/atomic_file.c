#include "common/atomic_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"

#define WRITE_MAX ((size_t)1 << 30) /* One write call moves less than 2 GiB. */

static enum dl_rc code_of(int errno_value)
{
    switch (errno_value) {
    case ENOSPC:
    case EDQUOT: return DL_EFULL;
    case ENOENT:
    case ENOTDIR: return DL_ENOTFOUND;
    case EACCES:
    case EPERM:
    case EROFS: return DL_EDENIED;
    default: return DL_EIO;
    }
}

enum dl_rc dl_atomic_file_open(struct dl_atomic_file *file, const char *path, struct dl_err *err)
{
    file->fd = -1;
    int length = snprintf(file->path, sizeof file->path, "%s", path);
    int temporary_length = snprintf(file->temporary, sizeof file->temporary, "%s.%ld.tmp", path, (long)getpid());
    if (length <= 0 || (size_t)length >= sizeof file->path || (size_t)temporary_length >= sizeof file->temporary) {
        return dl_err_set(err, DL_EINVAL, "write a file: its path is empty or too long");
    }
    file->fd = open(file->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file->fd < 0) {
        return dl_err_errno(err, code_of(errno), errno, "create %s", file->temporary);
    }
    return DL_OK;
}

enum dl_rc dl_atomic_file_write(struct dl_atomic_file *file, const void *bytes, size_t size, struct dl_err *err)
{
    const char *at = bytes;
    while (size > 0) {
        ssize_t written = write(file->fd, at, DL_MIN(size, WRITE_MAX));
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written < 0) {
            return dl_err_errno(err, code_of(errno), errno, "write %s", file->temporary);
        }
        at += written;
        size -= (size_t)written;
    }
    return DL_OK;
}

/* A rename is durable only once its folder is. */
static enum dl_rc sync_folder(const char *path, struct dl_err *err)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    size_t length = slash == NULL ? 1 : (slash == path ? 1 : (size_t)(slash - path));
    memcpy(folder, slash == NULL ? "." : path, length);
    folder[length] = 0;
    DL_AUTO_FD int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) != 0) {
        return dl_err_errno(err, DL_EIO, errno, "sync folder %s", folder);
    }
    return DL_OK;
}

enum dl_rc dl_atomic_file_commit(struct dl_atomic_file *file, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    if (fsync(file->fd) != 0) {
        rc = dl_err_errno(err, code_of(errno), errno, "sync %s", file->temporary);
    } else if (rename(file->temporary, file->path) != 0) {
        rc = dl_err_errno(err, code_of(errno), errno, "rename %s to %s", file->temporary, file->path);
    }
    if (rc != DL_OK) {
        dl_atomic_file_abandon(file);
        return rc;
    }
    close(file->fd);
    file->fd = -1;
    return sync_folder(file->path, err);
}

void dl_atomic_file_abandon(struct dl_atomic_file *file)
{
    if (file->fd >= 0) {
        close(file->fd);
        file->fd = -1;
        unlink(file->temporary);
    }
}
