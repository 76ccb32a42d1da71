#include "operator/local/control.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/mem.h"

#define SOCKET_NAME "control.sock"
#define ANSWER_BYTES_MAX (64u * 1024 * 1024)

/* A socket's address holds 108 bytes, a run folder's path may be longer: it is named through an open descriptor. */
static int open_folder(const struct op_rundir *dir, struct sockaddr_un *address)
{
    int folder = open(dir->path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    snprintf(address->sun_path, sizeof address->sun_path, "/proc/self/fd/%d/" SOCKET_NAME, folder);
    return folder;
}

enum dl_rc op_control_open(struct op_control *control, const struct op_rundir *dir, struct dl_err *err)
{
    for (size_t i = 0; i < OP_CONTROL_CLIENTS_MAX; i++) {
        control->clients[i] = (struct op_control_client){.fd = -1};
    }
    struct sockaddr_un address;
    DL_AUTO_FD int folder = open_folder(dir, &address);
    control->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    char stale[OP_PATH_MAX];
    op_rundir_path(dir, SOCKET_NAME, stale);
    unlink(stale); /* Of a supervisor that was killed: nobody else has the folder's lock. */
    mode_t mask = umask(0177);
    bool is_open = folder >= 0 && control->listener >= 0 &&
                   bind(control->listener, (struct sockaddr *)&address, sizeof address) == 0 &&
                   listen(control->listener, OP_CONTROL_CLIENTS_MAX) == 0;
    int number = errno;
    umask(mask);
    if (!is_open) {
        if (control->listener >= 0) {
            close(control->listener);
        }
        control->listener = -1;
        return dl_err_errno(err, DL_EIO, number, "open the control socket %s/" SOCKET_NAME, dir->path);
    }
    return DL_OK;
}

static void drop(struct op_control_client *client)
{
    close(client->fd);
    free(client->answer);
    *client = (struct op_control_client){.fd = -1};
}

void op_control_close(struct op_control *control, const struct op_rundir *dir)
{
    for (size_t i = 0; i < OP_CONTROL_CLIENTS_MAX; i++) {
        if (control->clients[i].fd >= 0) {
            drop(&control->clients[i]);
        }
    }
    if (control->listener >= 0) {
        close(control->listener);
        control->listener = -1;
        char path[OP_PATH_MAX];
        op_rundir_path(dir, SOCKET_NAME, path);
        unlink(path);
    }
}

unsigned int op_control_fds(const struct op_control *control, struct curl_waitfd *fds)
{
    unsigned int count = 0;
    bool has_room = false;
    for (size_t i = 0; i < OP_CONTROL_CLIENTS_MAX; i++) {
        const struct op_control_client *client = &control->clients[i];
        has_room = has_room || client->fd < 0;
        if (client->fd >= 0) {
            short events = client->answer != NULL ? CURL_WAIT_POLLOUT : CURL_WAIT_POLLIN;
            fds[count++] = (struct curl_waitfd){.fd = client->fd, .events = events};
        }
    }
    if (has_room && control->listener >= 0) {
        fds[count++] = (struct curl_waitfd){.fd = control->listener, .events = CURL_WAIT_POLLIN};
    }
    return count;
}

static void accept_clients(struct op_control *control, int64_t now_ns)
{
    for (size_t i = 0; i < OP_CONTROL_CLIENTS_MAX; i++) {
        struct op_control_client *client = &control->clients[i];
        if (client->fd >= 0) {
            continue;
        }
        int fd = accept4(control->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            return;
        }
        *client = (struct op_control_client){.fd = fd, .until_ns = now_ns + OP_CONTROL_TIMEOUT_NS};
    }
}

/* False when the client is to be dropped. */
static bool read_line(struct op_control_client *client, op_control_answer answer, void *context)
{
    ssize_t got = read(client->fd, client->line + client->line_used, sizeof client->line - 1 - client->line_used);
    if (got < 0) {
        return errno == EAGAIN || errno == EINTR;
    }
    client->line_used += (size_t)got;
    client->line[client->line_used] = 0;
    char *end = strchr(client->line, '\n');
    if (end == NULL) {
        return got > 0 && client->line_used < sizeof client->line - 1;
    }
    *end = 0;
    client->answer = answer(context, client->line);
    client->answer_bytes = client->answer != NULL ? strlen(client->answer) : 0;
    return client->answer != NULL;
}

static bool send_answer(struct op_control_client *client)
{
    while (client->answer_used < client->answer_bytes) {
        ssize_t sent = send(client->fd, client->answer + client->answer_used,
                            client->answer_bytes - client->answer_used, MSG_NOSIGNAL);
        if (sent < 0) {
            return errno == EAGAIN || errno == EINTR;
        }
        client->answer_used += (size_t)sent;
    }
    return false; /* All is said. */
}

void op_control_turn(struct op_control *control, int64_t now_ns, op_control_answer answer, void *context)
{
    if (control->listener >= 0) {
        accept_clients(control, now_ns);
    }
    for (size_t i = 0; i < OP_CONTROL_CLIENTS_MAX; i++) {
        struct op_control_client *client = &control->clients[i];
        if (client->fd < 0) {
            continue;
        }
        bool stays = now_ns < client->until_ns;
        if (stays && client->answer == NULL) {
            stays = read_line(client, answer, context);
        }
        if (stays && client->answer != NULL) {
            stays = send_answer(client);
        }
        if (!stays) {
            drop(client);
        }
    }
}

/* --- the other side --- */

static enum dl_rc read_answer(int fd, char **answer, struct dl_err *err)
{
    size_t used = 0, capacity = 4096;
    DL_AUTO_FREE char *text = malloc(capacity);
    while (text != NULL) {
        if (used + 1 == capacity) {
            char *larger = capacity < ANSWER_BYTES_MAX ? realloc(text, capacity * 2) : NULL;
            if (larger == NULL) {
                break;
            }
            text = larger;
            capacity *= 2;
        }
        ssize_t got = read(fd, text + used, capacity - 1 - used);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return dl_err_errno(err, errno == EAGAIN ? DL_ETIMEOUT : DL_EIO, errno, "read the run's answer");
        }
        if (got == 0) {
            text[used] = 0;
            *answer = dl_take(text);
            return DL_OK;
        }
        used += (size_t)got;
    }
    return dl_err_set(err, DL_ENOMEM, "no memory for the run's answer");
}

enum dl_rc op_control_ask(const struct op_rundir *dir, const char *line, char **answer, struct dl_err *err)
{
    struct sockaddr_un address;
    DL_AUTO_FD int folder = open_folder(dir, &address);
    DL_AUTO_FD int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval bound = {.tv_sec = 5};
    if (folder < 0 || fd < 0 || setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof bound) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &bound, sizeof bound) != 0) {
        return dl_err_errno(err, DL_EIO, errno, "reach the run in %s", dir->path);
    }
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        bool is_nobody = errno == ENOENT || errno == ECONNREFUSED;
        return dl_err_errno(err, is_nobody ? DL_ENOTFOUND : DL_EIO, errno, "reach the run in %s (does it still run?)",
                            dir->path);
    }
    size_t size = strlen(line);
    if (send(fd, line, size, MSG_NOSIGNAL) != (ssize_t)size || send(fd, "\n", 1, MSG_NOSIGNAL) != 1) {
        return dl_err_errno(err, DL_EIO, errno, "ask the run in %s", dir->path);
    }
    return read_answer(fd, answer, err);
}

int op_signal_parse(const char *text)
{
    if (text[0] >= '0' && text[0] <= '9') {
        char *end = NULL;
        unsigned long number = strtoul(text, &end, 10);
        return *end == 0 && number > 0 && number < 32 ? (int)number : 0;
    }
    const char *name = strncmp(text, "SIG", 3) == 0 ? text + 3 : text;
    for (int number = 1; number < 32; number++) {
        const char *abbreviation = sigabbrev_np(number);
        if (abbreviation != NULL && strcmp(abbreviation, name) == 0) {
            return number;
        }
    }
    return 0;
}
