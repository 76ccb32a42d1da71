/* op_config: kubeconfig files and the configuration of a pod. */
#include <sys/stat.h>

#include "common/mem.h"
#include "operator/kube/config.h"
#include "tests/unit/unit.h"

static char folder[] = "/tmp/kube-config-XXXXXX";

static const char *path_of(const char *name, char path[static 256])
{
    snprintf(path, 256, "%s/%s", folder, name);
    return path;
}

static void write_text(const char *name, const char *text)
{
    char path[256];
    FILE *file = fopen(path_of(name, path), "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    fputs(text, file);
    fclose(file);
}

static void clean_environment(void)
{
    unsetenv("KUBECONFIG");
    unsetenv("KUBERNETES_SERVICE_HOST");
    unsetenv("KUBERNETES_SERVICE_PORT");
    setenv("HOME", folder, 1);
}

static void prepare(void)
{
    static bool is_made;
    if (!is_made) {
        CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(folder));
        is_made = true;
    }
    clean_environment();
}

static const char first[] = "apiVersion: v1\n"
                            "kind: Config\n"
                            "current-context: dev\n"
                            "contexts:\n"
                            "- {name: dev, context: {cluster: here, user: cert, namespace: team}}\n"
                            "- {name: plug, context: {cluster: named, user: plug}}\n"
                            "- name: lost\n"
                            "  context: {cluster: nowhere, user: cert}\n"
                            "- {name: old, context: {cluster: here, user: old}}\n"
                            "- {name: half, context: {cluster: here, user: half}}\n"
                            "- {name: alone, context: {cluster: here}}\n"
                            "clusters:\n"
                            "- name: here\n"
                            "  cluster:\n"
                            "    server: https://127.0.0.1:6443/\n"
                            "    certificate-authority: pki/ca.crt\n"
                            "- name: named\n"
                            "  cluster:\n"
                            "    server: https://10.0.0.1\n"
                            "    certificate-authority-data: UEVNCg==\n"
                            "    tls-server-name: kubernetes\n"
                            "    proxy-url: http://proxy:3128\n"
                            "users:\n"
                            "- name: cert\n"
                            "  user:\n"
                            "    client-certificate-data: Q0VSVA==\n"
                            "    client-key: /abs/key.pem\n"
                            "- name: plug\n"
                            "  user:\n"
                            "    exec:\n"
                            "      apiVersion: client.authentication.k8s.io/v1beta1\n"
                            "      command: ./bin/plugin\n"
                            "      args: [get-token, --cluster, x]\n"
                            "      env: [{name: AWS_PROFILE, value: dev}]\n"
                            "      installHint: install the plugin\n"
                            "      provideClusterInfo: true\n"
                            "- {name: old, user: {auth-provider: {name: gcp}}}\n"
                            "- {name: half, user: {client-certificate: a.pem}}\n";

static void test_contexts(void)
{
    char path[256], expected[300];
    struct op_config config;
    struct dl_err err;
    prepare();
    write_text("first", first);
    path_of("first", path);
    CU_ASSERT_EQUAL_FATAL(op_config_load(path, NULL, &config, &err), DL_OK);
    CU_ASSERT_STRING_EQUAL(config.server, "https://127.0.0.1:6443");
    CU_ASSERT_STRING_EQUAL(config.space, "team");
    CU_ASSERT_STRING_EQUAL(config.ca_file, path_of("pki/ca.crt", expected)); /* From the file's folder. */
    CU_ASSERT_STRING_EQUAL(config.cert_data, "CERT");
    CU_ASSERT_STRING_EQUAL(config.key_file, "/abs/key.pem");
    CU_ASSERT_FALSE(config.is_in_cluster);
    CU_ASSERT_PTR_NOT_NULL(strstr(config.origin, "context dev"));
    struct op_config copy;
    CU_ASSERT_EQUAL_FATAL(op_config_copy(&config, &copy, &err), DL_OK);
    op_config_release(&config);
    CU_ASSERT_STRING_EQUAL(copy.cert_data, "CERT");
    op_config_release(&copy);

    CU_ASSERT_EQUAL_FATAL(op_config_load(path, "plug", &config, &err), DL_OK);
    CU_ASSERT_STRING_EQUAL(config.space, "default");
    CU_ASSERT_STRING_EQUAL(config.ca_data, "PEM\n");
    CU_ASSERT_STRING_EQUAL(config.tls_server_name, "kubernetes");
    CU_ASSERT_STRING_EQUAL(config.proxy_url, "http://proxy:3128");
    CU_ASSERT_STRING_EQUAL(config.exec.command, path_of("./bin/plugin", expected));
    CU_ASSERT_STRING_EQUAL(config.exec.args[2], "x");
    CU_ASSERT_PTR_NULL(config.exec.args[3]);
    CU_ASSERT_STRING_EQUAL(config.exec.env[0], "AWS_PROFILE=dev");
    CU_ASSERT_TRUE(config.exec.provide_cluster_info);
    op_config_release(&config);
    CU_ASSERT_EQUAL(op_config_load(path, "alone", &config, &err), DL_OK); /* A context without a user. */
    op_config_release(&config);
}

static void test_refusals(void)
{
    char path[256];
    struct op_config config;
    struct dl_err err;
    prepare();
    write_text("first", first);
    static const struct {
        const char *context, *said;
        enum dl_rc rc;
    } rows[] = {
        {"missing", "no context 'missing'", DL_EINVAL},
        {"lost", "cluster 'nowhere'", DL_EINVAL},
        {"old", "auth-provider", DL_EUNSUPPORTED},
        {"half", "belong together", DL_EINVAL},
    };
    for (size_t i = 0; i < DL_COUNT_OF(rows); i++) {
        CU_ASSERT_EQUAL(op_config_load(path_of("first", path), rows[i].context, &config, &err), rows[i].rc);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, rows[i].said));
    }
    static const char *const broken[] = {
        "",
        "current-context: a\n",
        "contexts: [{name: a, context: {cluster: c}}]\nclusters: [{name: c, cluster: {server: https://x}}]\n",
        "current-context: a\ncontexts: [{name: a, context: {cluster: c}}]\nclusters: [{name: c, cluster: {server: "
        "ftp://x}}]\n",
        "current-context: a\ncontexts: [{name: a, context: {cluster: c}}]\nclusters: [{name: c, cluster: {server: "
        "https://x, certificate-authority-data: '%%%'}}]\n",
        "current-context: [\n",
    };
    for (size_t i = 0; i < DL_COUNT_OF(broken); i++) {
        write_text("broken", broken[i]);
        CU_ASSERT_EQUAL(op_config_load(path_of("broken", path), NULL, &config, &err), DL_EINVAL);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "broken"));
    }
    CU_ASSERT_EQUAL(op_config_load(path_of("not-there", path), NULL, &config, &err), DL_ENOTFOUND);
    CU_ASSERT_EQUAL(op_config_load(NULL, NULL, &config, &err), DL_ENOTFOUND);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, ".kube/config"));
}

/* Of several files the first that names a thing wins; files that are not there are passed over. */
static void test_list(void)
{
    char list[1024], one[256], two[256];
    struct op_config config;
    struct dl_err err;
    prepare();
    write_text("one", "current-context: both\nusers: [{name: u, user: {token: from-one}}]\n");
    write_text("two", "current-context: other\n"
                      "contexts: [{name: both, context: {cluster: c, user: u}}]\n"
                      "clusters: [{name: c, cluster: {server: 'https://two:1'}}]\n"
                      "users: [{name: u, user: {token: from-two}}]\n");
    snprintf(list, sizeof list, "%s/absent:%s:%s", folder, path_of("one", one), path_of("two", two));
    setenv("KUBECONFIG", list, 1);
    CU_ASSERT_EQUAL_FATAL(op_config_load(NULL, NULL, &config, &err), DL_OK);
    CU_ASSERT_STRING_EQUAL(config.server, "https://two:1");
    CU_ASSERT_STRING_EQUAL(config.token, "from-one");
    op_config_release(&config);
    snprintf(list, sizeof list, "%s/absent:%s/absent-too", folder, folder);
    setenv("KUBECONFIG", list, 1);
    CU_ASSERT_EQUAL(op_config_load(NULL, NULL, &config, &err), DL_ENOTFOUND);
    clean_environment();
}

static void test_in_cluster(void)
{
    char path[256], text[300];
    struct op_config config;
    struct dl_err err;
    prepare();
    CU_ASSERT_EQUAL(op_config_in_cluster(folder, &config, &err), DL_ENOTFOUND);
    setenv("KUBERNETES_SERVICE_HOST", "fd00::1", 1);
    setenv("KUBERNETES_SERVICE_PORT", "443", 1);
    unlink(path_of("token", path));
    CU_ASSERT_EQUAL(op_config_in_cluster(folder, &config, &err), DL_ENOTFOUND);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "service account token"));
    write_text("token", "abc");
    write_text("namespace", "ops\n");
    CU_ASSERT_EQUAL_FATAL(op_config_in_cluster(folder, &config, &err), DL_OK);
    CU_ASSERT_STRING_EQUAL(config.server, "https://[fd00::1]:443");
    CU_ASSERT_STRING_EQUAL(config.space, "ops");
    CU_ASSERT_STRING_EQUAL(config.token_file, path_of("token", text));
    CU_ASSERT_STRING_EQUAL(config.ca_file, path_of("ca.crt", text));
    CU_ASSERT_TRUE(config.is_in_cluster);
    op_config_release(&config);
    clean_environment();
    static const char *const names[] = {"first", "broken", "one", "two", "token", "namespace"};
    for (size_t i = 0; i < DL_COUNT_OF(names); i++) {
        unlink(path_of(names[i], path));
    }
    rmdir(folder);
}

UNIT_MAIN("kube_config", {"contexts", test_contexts}, {"refusals", test_refusals}, {"KUBECONFIG list", test_list},
          {"in cluster", test_in_cluster})
