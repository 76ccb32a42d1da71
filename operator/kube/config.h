/* op_config: where the API server is and who we are there: in a pod, or from kubeconfig files.
 *
 * Reads files at load; what changes later (token files, certificates) is read again by op_auth. Any thread; layer
 * operator/kube. */
#ifndef OP_KUBE_CONFIG_H
#define OP_KUBE_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define OP_CONFIG_FILE_BYTES_MAX (1024 * 1024)
#define OP_EXEC_ARGS_MAX 64
#define OP_SERVICE_ACCOUNT_DIR "/var/run/secrets/kubernetes.io/serviceaccount"

/* A credential plugin (client.authentication.k8s.io v1 or v1beta1). */
struct op_exec {
    char *
        command; /* Absolute, or searched in PATH; relative paths are taken from the kubeconfig's folder. NULL: none. */
    char *args[OP_EXEC_ARGS_MAX + 1]; /* Without the command; ends with NULL. */
    char *env[OP_EXEC_ARGS_MAX + 1];  /* "NAME=value", added to our own environment; ends with NULL. */
    char *api_version;
    char *install_hint; /* Said when the command is not there; may be NULL. */
    bool provide_cluster_info;
};

/* All text is owned, NULL where absent. Of a file and its inline data only one is set. */
struct op_config {
    char *server; /* "https://host:port[/prefix]", no slash at the end. */
    char *space;  /* Namespace of the context, or of the pod; "default" when none is named. */
    char *ca_file, *ca_data;
    char *cert_file, *cert_data, *key_file, *key_data; /* PEM. */
    char *token, *token_file;
    char *username, *password;
    char *tls_server_name; /* Name to expect in the certificate in place of the host. */
    char *proxy_url;
    bool insecure_skip_tls_verify;
    bool is_in_cluster;
    struct op_exec exec;
    char *origin; /* For messages: "in-cluster", or "kubeconfig PATH, context NAME". */
};

/* In this order: `kubeconfig` when not NULL (DL_ENOTFOUND when it is not there); the KUBECONFIG list; in-cluster
 * (when KUBERNETES_SERVICE_HOST is set); ~/.kube/config. `context` NULL: the current one. Of several files in
 * KUBECONFIG the first that names a thing wins. DL_EINVAL: says which file, line or entry is wrong; DL_ENOTFOUND:
 * nothing configured, says what was looked at; DL_EUNSUPPORTED: an auth-provider. */
DL_MUST_CHECK enum dl_rc op_config_load(const char *kubeconfig, const char *context, struct op_config *out,
                                        struct dl_err *err);

/* A pod's own access: token, ca.crt and namespace in `folder` (NULL: OP_SERVICE_ACCOUNT_DIR), server from the
 * environment. */
DL_MUST_CHECK enum dl_rc op_config_in_cluster(const char *folder, struct op_config *out, struct dl_err *err);

/* DL_ENOMEM. */
DL_MUST_CHECK enum dl_rc op_config_copy(const struct op_config *config, struct op_config *out, struct dl_err *err);
void op_config_release(struct op_config *config);

#endif
