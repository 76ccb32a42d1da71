#include "operator/kube/config.h"

#include <assert.h>
#include <errno.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/buf.h"
#include "common/mem.h"
#include "common/yaml.h"

#define FILES_MAX 16

struct file {
    char *path;
    struct dl_node *root;
};

/* All kubeconfig files, the first one counts most. */
struct files {
    struct file items[FILES_MAX];
    size_t count;
};

static enum dl_rc no_memory(struct dl_err *err)
{
    return dl_err_set(err, DL_ENOMEM, "no memory for the Kubernetes configuration");
}

static enum dl_rc read_text(const char *path, char **out, struct dl_err *err)
{
    DL_AUTO_FILE FILE *file = fopen(path, "re");
    if (file == NULL) {
        return dl_err_errno(err, errno == ENOENT ? DL_ENOTFOUND : DL_EDENIED, errno, "cannot read %s", path);
    }
    struct dl_buf text;
    dl_buf_init(&text, OP_CONFIG_FILE_BYTES_MAX);
    char bytes[4096];
    size_t got;
    while ((got = fread(bytes, 1, sizeof bytes, file)) > 0) {
        dl_buf_append(&text, bytes, got);
    }
    bool is_bad = ferror(file) != 0 || text.failed || text.size == 0;
    char *taken = dl_buf_take(&text);
    if (is_bad || taken == NULL) {
        free(taken);
        return dl_err_set(err, DL_EINVAL, "%s is empty, cannot be read, or is longer than %d bytes", path,
                          OP_CONFIG_FILE_BYTES_MAX);
    }
    *out = taken;
    return DL_OK;
}

#define TEXTS_MAX 18

static size_t texts_of(struct op_config *config, char **texts[static TEXTS_MAX])
{
    char **all[] = {&config->server,           &config->space,     &config->ca_file,
                    &config->ca_data,          &config->cert_file, &config->cert_data,
                    &config->key_file,         &config->key_data,  &config->token,
                    &config->token_file,       &config->username,  &config->password,
                    &config->tls_server_name,  &config->proxy_url, &config->exec.command,
                    &config->exec.api_version, &config->origin,    &config->exec.install_hint};
    static_assert(DL_COUNT_OF(all) == TEXTS_MAX, "every text is copied and freed");
    memcpy(texts, all, sizeof all);
    return DL_COUNT_OF(all);
}

void op_config_release(struct op_config *config)
{
    char **texts[TEXTS_MAX];
    size_t count = texts_of(config, texts);
    for (size_t i = 0; i < count; i++) {
        free(*texts[i]);
    }
    for (size_t i = 0; i < OP_EXEC_ARGS_MAX; i++) {
        free(config->exec.args[i]);
        free(config->exec.env[i]);
    }
    *config = (struct op_config){0};
}

/* In place: text that is another's becomes an own copy. */
static bool own(char **text)
{
    char *copy = *text != NULL ? strdup(*text) : NULL;
    bool is_copied = *text == NULL || copy != NULL;
    *text = copy;
    return is_copied;
}

enum dl_rc op_config_copy(const struct op_config *config, struct op_config *out, struct dl_err *err)
{
    struct op_config copy = *config;
    char **texts[TEXTS_MAX];
    size_t count = texts_of(&copy, texts);
    bool is_copied = true;
    for (size_t i = 0; i < count; i++) {
        is_copied = own(texts[i]) && is_copied;
    }
    for (size_t i = 0; i < OP_EXEC_ARGS_MAX; i++) {
        is_copied = own(&copy.exec.args[i]) && is_copied;
        is_copied = own(&copy.exec.env[i]) && is_copied;
    }
    if (!is_copied) {
        op_config_release(&copy);
        return no_memory(err);
    }
    *out = copy;
    return DL_OK;
}

/* --- in a pod --- */

static enum dl_rc in_cluster(const char *folder, struct op_config *config, struct dl_err *err)
{
    const char *host = getenv("KUBERNETES_SERVICE_HOST");
    const char *port = getenv("KUBERNETES_SERVICE_PORT");
    if (host == NULL || host[0] == 0 || port == NULL || port[0] == 0) {
        return dl_err_set(err, DL_ENOTFOUND, "not in a pod: KUBERNETES_SERVICE_HOST and _PORT are not set");
    }
    bool is_v6 = strchr(host, ':') != NULL;
    DL_AUTO_FREE char *space_path = NULL;
    if (asprintf(&config->server, "https://%s%s%s:%s", is_v6 ? "[" : "", host, is_v6 ? "]" : "", port) < 0 ||
        asprintf(&config->ca_file, "%s/ca.crt", folder) < 0 || asprintf(&config->token_file, "%s/token", folder) < 0 ||
        asprintf(&space_path, "%s/namespace", folder) < 0 || (config->origin = strdup("in-cluster")) == NULL) {
        return no_memory(err);
    }
    config->is_in_cluster = true;
    DL_AUTO_FREE char *text = NULL;
    enum dl_rc rc = read_text(config->token_file, &text, err);
    if (rc != DL_OK) {
        return dl_err_wrap(err, "in-cluster configuration (is a service account token mounted?)");
    }
    free(dl_take(text));
    if (read_text(space_path, &text, NULL) == DL_OK) {
        text[strcspn(text, " \r\n")] = 0;
    }
    config->space = strdup(text != NULL && text[0] != 0 ? text : "default");
    return config->space != NULL ? DL_OK : no_memory(err);
}

enum dl_rc op_config_in_cluster(const char *folder, struct op_config *out, struct dl_err *err)
{
    struct op_config config = {0};
    enum dl_rc rc = in_cluster(folder != NULL ? folder : OP_SERVICE_ACCOUNT_DIR, &config, err);
    if (rc == DL_OK) {
        *out = config;
    } else {
        op_config_release(&config);
    }
    return rc;
}

/* --- kubeconfig --- */

static const char *scalar(const struct dl_node *map, const char *key)
{
    const struct dl_node *node = map != NULL && map->kind == DL_NODE_MAP ? dl_node_get(map, key) : NULL;
    return node != NULL && node->kind == DL_NODE_SCALAR && !dl_node_is_null(node) && node->text[0] != 0 ? node->text
                                                                                                        : NULL;
}

static const struct dl_node *child(const struct dl_node *map, const char *key)
{
    return map != NULL && map->kind == DL_NODE_MAP ? dl_node_get(map, key) : NULL;
}

/* The entry `name` of the list `list` ("clusters": [{name, cluster: {...}}]); the first file that has it counts. */
static const struct dl_node *entry(const struct files *files, const char *list, const char *kind, const char *name,
                                   const struct file **file)
{
    for (size_t i = 0; i < files->count; i++) {
        const struct dl_node *items = child(files->items[i].root, list);
        const struct dl_node *item = items != NULL && items->kind == DL_NODE_LIST ? items->first : NULL;
        for (; item != NULL; item = item->next) {
            const char *its_name = scalar(item, "name");
            if (its_name != NULL && strcmp(its_name, name) == 0 && child(item, kind) != NULL) {
                *file = &files->items[i];
                return child(item, kind);
            }
        }
    }
    return NULL;
}

static bool copy_scalar(const struct dl_node *map, const char *key, char **out)
{
    const char *text = scalar(map, key);
    *out = text != NULL ? strdup(text) : NULL;
    return text == NULL || *out != NULL;
}

/* A path in a kubeconfig is relative to that file's folder. */
static bool copy_path(const struct file *file, const char *text, char **out)
{
    const char *slash = strrchr(file->path, '/');
    if (text == NULL) {
        *out = NULL;
        return true;
    }
    if (text[0] == '/' || slash == NULL) {
        *out = strdup(text);
    } else if (asprintf(out, "%.*s/%s", (int)(slash - file->path), file->path, text) < 0) {
        *out = NULL;
    }
    return *out != NULL;
}

static enum dl_rc copy_base64(const struct file *file, const struct dl_node *map, const char *key, char **out,
                              struct dl_err *err)
{
    const char *text = scalar(map, key);
    if (text == NULL) {
        return DL_OK;
    }
    size_t size = strlen(text);
    DL_AUTO_FREE unsigned char *bytes = calloc(1, size + 4);
    if (bytes == NULL) {
        return no_memory(err);
    }
    int decoded = EVP_DecodeBlock(bytes, (const unsigned char *)text, (int)size);
    if (decoded <= 0) {
        return dl_err_set(err, DL_EINVAL, "%s line %u: %s is not base64", file->path, dl_node_get(map, key)->line, key);
    }
    *out = strdup((char *)bytes); /* PEM is text: it ends at the padding's zero bytes. */
    return *out != NULL ? DL_OK : no_memory(err);
}

/* Of inline data and a file the data counts. */
static enum dl_rc copy_pem(const struct file *file, const struct dl_node *map, const char *data_key,
                           const char *file_key, char **data, char **path, struct dl_err *err)
{
    enum dl_rc rc = copy_base64(file, map, data_key, data, err);
    if (rc == DL_OK && *data == NULL && !copy_path(file, scalar(map, file_key), path)) {
        rc = no_memory(err);
    }
    return rc;
}

static enum dl_rc read_cluster(const struct file *file, const struct dl_node *cluster, struct op_config *config,
                               struct dl_err *err)
{
    const char *skip = scalar(cluster, "insecure-skip-tls-verify");
    config->insecure_skip_tls_verify = skip != NULL && strcmp(skip, "true") == 0;
    if (!copy_scalar(cluster, "server", &config->server) ||
        !copy_scalar(cluster, "tls-server-name", &config->tls_server_name) ||
        !copy_scalar(cluster, "proxy-url", &config->proxy_url)) {
        return no_memory(err);
    }
    if (config->server == NULL ||
        (strncmp(config->server, "https://", 8) != 0 && strncmp(config->server, "http://", 7) != 0)) {
        return dl_err_set(err, DL_EINVAL, "%s line %u: the cluster has no server: https://...", file->path,
                          cluster->line);
    }
    for (size_t size = strlen(config->server); size > 0 && config->server[size - 1] == '/'; size--) {
        config->server[size - 1] = 0;
    }
    return copy_pem(file, cluster, "certificate-authority-data", "certificate-authority", &config->ca_data,
                    &config->ca_file, err);
}

static enum dl_rc read_exec(const struct file *file, const struct dl_node *exec, struct op_config *config,
                            struct dl_err *err)
{
    struct op_exec *out = &config->exec;
    const char *command = scalar(exec, "command");
    const char *cluster_info = scalar(exec, "provideClusterInfo");
    out->provide_cluster_info = cluster_info != NULL && strcmp(cluster_info, "true") == 0;
    if (command == NULL) {
        return dl_err_set(err, DL_EINVAL, "%s line %u: exec has no command", file->path, exec->line);
    }
    bool is_path = strchr(command, '/') != NULL; /* Else it is searched in PATH. */
    if (!(is_path ? copy_path(file, command, &out->command) : copy_scalar(exec, "command", &out->command)) ||
        !copy_scalar(exec, "apiVersion", &out->api_version) || !copy_scalar(exec, "installHint", &out->install_hint)) {
        return no_memory(err);
    }
    if (out->api_version == NULL || strncmp(out->api_version, "client.authentication.k8s.io/v1", 31) != 0 ||
        (out->api_version[31] != 0 && strcmp(out->api_version + 31, "beta1") != 0)) {
        return dl_err_set(err, DL_EUNSUPPORTED,
                          "%s line %u: exec.apiVersion must be client.authentication.k8s.io/v1 "
                          "or v1beta1",
                          file->path, exec->line);
    }
    const struct dl_node *args = child(exec, "args"), *env = child(exec, "env");
    size_t count = 0;
    for (const struct dl_node *arg = args != NULL ? args->first : NULL; arg != NULL; arg = arg->next) {
        if (count == OP_EXEC_ARGS_MAX || arg->kind != DL_NODE_SCALAR) {
            return dl_err_set(err, DL_EINVAL, "%s line %u: exec.args: at most %d texts", file->path, arg->line,
                              OP_EXEC_ARGS_MAX);
        }
        if ((out->args[count++] = strdup(arg->text)) == NULL) {
            return no_memory(err);
        }
    }
    count = 0;
    for (const struct dl_node *item = env != NULL ? env->first : NULL; item != NULL; item = item->next) {
        const char *name = scalar(item, "name"), *value = scalar(item, "value");
        if (count == OP_EXEC_ARGS_MAX || name == NULL) {
            return dl_err_set(err, DL_EINVAL, "%s line %u: exec.env: at most %d entries with a name", file->path,
                              item->line, OP_EXEC_ARGS_MAX);
        }
        if (asprintf(&out->env[count], "%s=%s", name, value != NULL ? value : "") < 0) {
            out->env[count] = NULL;
            return no_memory(err);
        }
        count++;
    }
    return DL_OK;
}

static enum dl_rc read_user(const struct file *file, const struct dl_node *user, struct op_config *config,
                            struct dl_err *err)
{
    if (child(user, "auth-provider") != NULL) {
        return dl_err_set(err, DL_EUNSUPPORTED,
                          "%s line %u: auth-provider was removed from Kubernetes; use an exec "
                          "credential plugin or a token",
                          file->path, user->line);
    }
    enum dl_rc rc = copy_pem(file, user, "client-certificate-data", "client-certificate", &config->cert_data,
                             &config->cert_file, err);
    if (rc == DL_OK) {
        rc = copy_pem(file, user, "client-key-data", "client-key", &config->key_data, &config->key_file, err);
    }
    if (rc == DL_OK &&
        (!copy_path(file, scalar(user, "tokenFile"), &config->token_file) ||
         !copy_scalar(user, "token", &config->token) || !copy_scalar(user, "username", &config->username) ||
         !copy_scalar(user, "password", &config->password))) {
        rc = no_memory(err);
    }
    bool has_cert = config->cert_data != NULL || config->cert_file != NULL;
    bool has_key = config->key_data != NULL || config->key_file != NULL;
    if (rc == DL_OK && has_cert != has_key) {
        rc = dl_err_set(err, DL_EINVAL, "%s line %u: a client certificate and its key belong together", file->path,
                        user->line);
    }
    const struct dl_node *exec = child(user, "exec");
    return rc == DL_OK && exec != NULL && exec->kind == DL_NODE_MAP ? read_exec(file, exec, config, err) : rc;
}

static const char *current_context(const struct files *files)
{
    for (size_t i = 0; i < files->count; i++) {
        const char *name = scalar(files->items[i].root, "current-context");
        if (name != NULL) {
            return name;
        }
    }
    return NULL;
}

static enum dl_rc read_context(const struct files *files, const char *name, struct op_config *config,
                               struct dl_err *err)
{
    const char *first = files->items[0].path;
    name = name != NULL ? name : current_context(files);
    if (name == NULL) {
        return dl_err_set(err, DL_EINVAL, "%s names no current-context; name one with --context", first);
    }
    const struct file *file = NULL;
    const struct dl_node *context = entry(files, "contexts", "context", name, &file);
    if (context == NULL) {
        return dl_err_set(err, DL_EINVAL, "%s has no context '%s'", first, name);
    }
    const char *space = scalar(context, "namespace");
    if (asprintf(&config->origin, "kubeconfig %s, context %s", file->path, name) < 0 ||
        (config->space = strdup(space != NULL ? space : "default")) == NULL) {
        return no_memory(err);
    }
    const char *cluster_name = scalar(context, "cluster"), *user_name = scalar(context, "user");
    const struct dl_node *cluster =
        cluster_name != NULL ? entry(files, "clusters", "cluster", cluster_name, &file) : NULL;
    if (cluster == NULL) {
        return dl_err_set(err, DL_EINVAL, "%s: context '%s' names the cluster '%s', which is not there", file->path,
                          name, cluster_name != NULL ? cluster_name : "");
    }
    enum dl_rc rc = read_cluster(file, cluster, config, err);
    if (rc != DL_OK || user_name == NULL) {
        return rc;
    }
    const struct dl_node *user = entry(files, "users", "user", user_name, &file);
    if (user == NULL) {
        return dl_err_set(err, DL_EINVAL, "%s: context '%s' names the user '%s', which is not there", file->path, name,
                          user_name);
    }
    return dl_node_is_null(user) ? DL_OK : read_user(file, user, config, err);
}

static enum dl_rc add_file(struct files *files, const char *path, size_t path_size, struct dl_err *err)
{
    if (files->count == FILES_MAX) {
        return dl_err_set(err, DL_EINVAL, "KUBECONFIG lists more than %d files", FILES_MAX);
    }
    DL_AUTO_FREE char *copy = strndup(path, path_size);
    DL_AUTO_FREE char *text = NULL;
    struct dl_node *root = NULL;
    enum dl_rc rc = copy == NULL ? no_memory(err) : read_text(copy, &text, err);
    if (rc == DL_OK) {
        rc = dl_yaml_parse(text, strlen(text), copy, &root, err);
    }
    if (rc == DL_OK) {
        files->items[files->count++] = (struct file){dl_take(copy), root};
    }
    return rc;
}

/* A colon-separated list; files that are not there are passed over, as kubectl does. */
static enum dl_rc add_list(struct files *files, const char *list, struct dl_err *err)
{
    while (*list != 0) {
        size_t size = strcspn(list, ":");
        enum dl_rc rc = size > 0 ? add_file(files, list, size, err) : DL_OK;
        if (rc != DL_OK && rc != DL_ENOTFOUND) {
            return rc;
        }
        list += size + (list[size] == ':');
    }
    return files->count > 0 ? DL_OK : dl_err_set(err, DL_ENOTFOUND, "none of the files that KUBECONFIG names is there");
}

static enum dl_rc find_files(const char *kubeconfig, struct files *files, struct dl_err *err)
{
    const char *list = getenv("KUBECONFIG"), *home = getenv("HOME");
    if (kubeconfig != NULL) {
        return add_file(files, kubeconfig, strlen(kubeconfig), err);
    }
    if (list != NULL && list[0] != 0) {
        return add_list(files, list, err);
    }
    DL_AUTO_FREE char *path = NULL;
    if (asprintf(&path, "%s/.kube/config", home != NULL ? home : "") < 0) {
        path = NULL;
        return no_memory(err);
    }
    enum dl_rc rc = add_file(files, path, strlen(path), err);
    if (rc == DL_ENOTFOUND) {
        return dl_err_set(err, rc, "no access to a cluster: no --kubeconfig, no KUBECONFIG, not in a pod, and no %s",
                          path);
    }
    return rc;
}

enum dl_rc op_config_load(const char *kubeconfig, const char *context, struct op_config *out, struct dl_err *err)
{
    const char *list = getenv("KUBECONFIG"), *service = getenv("KUBERNETES_SERVICE_HOST");
    bool has_files = kubeconfig != NULL || (list != NULL && list[0] != 0);
    if (!has_files && service != NULL && service[0] != 0) {
        return op_config_in_cluster(NULL, out, err);
    }
    struct files files = {.count = 0};
    struct op_config config = {0};
    enum dl_rc rc = find_files(kubeconfig, &files, err);
    if (rc == DL_OK) {
        rc = read_context(&files, context, &config, err);
    }
    for (size_t i = 0; i < files.count; i++) {
        free(files.items[i].path);
        dl_node_free(files.items[i].root);
    }
    if (rc == DL_OK) {
        *out = config;
    } else {
        op_config_release(&config);
    }
    return rc;
}
