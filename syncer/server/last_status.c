#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/atomic_file.h"
#include "common/log.h"
#include "common/mem.h"
#include "syncer/server/internal.h"

void sy_server_leave_status(struct sy_server *server)
{
    if (server->store == NULL) { /* Memory only: there is no folder. */
        return;
    }
    char path[PATH_MAX];
    struct dl_err err = {.text = "no memory"};
    struct dl_atomic_file file = {.fd = -1};
    DL_AUTO_FREE char *text = sy_status_json(server);
    int length = snprintf(path, sizeof path, "%s/status.json", server->options->state_dir);
    enum dl_rc rc = text == NULL || length < 0 || (size_t)length >= sizeof path ? DL_ENOMEM : DL_OK;
    rc = rc == DL_OK ? dl_atomic_file_open(&file, path, &err) : rc;
    rc = rc == DL_OK ? dl_atomic_file_write(&file, text, strlen(text), &err) : rc;
    rc = rc == DL_OK ? dl_atomic_file_commit(&file, &err) : rc;
    if (rc != DL_OK) {
        dl_atomic_file_abandon(&file);
        dl_warn("the last status could not be written error=\"%s\"", err.text);
    }
}
