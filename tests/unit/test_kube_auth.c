/* op_auth with op_client: tokens that expire, credential plugins, certificates. */
#include "tests/unit/fake_tls.h"
#include "tests/unit/kube_rig.h"

static void write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    fputs(text, file);
    fclose(file);
}

/* A token read once expires: it is read again, at once after a 401. */
static void test_token_is_read_again(void)
{
    struct rig rig;
    struct rig_answer answer;
    char folder[] = "/tmp/kube-token-XXXXXX", path[64];
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/token", folder);
    write_text(path, "first\n");
    rig.api = fake_api_start(NULL);
    fake_api_set_token(rig.api, "first");
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    struct op_config config = fake_api_config(rig.api);
    config.token_file = path;
    rig_start_with(&rig, &config, NULL);
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    CU_ASSERT_STRING_EQUAL(rig.api->last_authorization, "Bearer first");
    write_text(path, "second\n");
    fake_api_set_token(rig.api, "second");
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    CU_ASSERT_EQUAL(answer.tries, 2);
    CU_ASSERT_STRING_EQUAL(rig.api->last_authorization, "Bearer second");
    /* A POST too: a 401 had no effect. */
    write_text(path, "third\n");
    fake_api_set_token(rig.api, "third");
    fake_api_remove(rig.api, RIG_POD_PATH);
    CU_ASSERT_EQUAL(rig_create(&rig, &answer), DL_OK);
    /* A token that stays wrong is said, not tried for ever. */
    fake_api_set_token(rig.api, "fourth");
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_EDENIED);
    CU_ASSERT_EQUAL(answer.status, 401);
    CU_ASSERT_EQUAL(answer.tries, 2);
    rig_stop(&rig);
    unlink(path);
    rmdir(folder);
}

/* A credential plugin: its token is used, renewed after a 401, and its failures are told. */
static void test_exec_plugin(void)
{
    struct rig rig;
    struct rig_answer answer;
    char folder[] = "/tmp/kube-exec-XXXXXX", script[64], token[64], count[64];
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(folder));
    snprintf(script, sizeof script, "%s/plugin", folder);
    snprintf(token, sizeof token, "%s/token", folder);
    snprintf(count, sizeof count, "%s/count", folder);
    write_text(
        script,
        "#!/bin/sh\n"
        "echo x >> \"$2/count\"\n"
        "case \"$KUBERNETES_EXEC_INFO\" in *client.authentication.k8s.io/v1*) ;; *) exit 3 ;; esac\n"
        "[ \"$EXTRA\" = 'a value' ] || exit 4\n"
        "printf '{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\","
        "\"status\":{\"token\":\"%s\",\"expirationTimestamp\":\"2099-01-01T00:00:00Z\"}}' \"$(cat \"$2/token\")\"\n");
    write_text(token, "plug-1");
    rig.api = fake_api_start(NULL);
    fake_api_set_token(rig.api, "plug-1");
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    struct op_config config = fake_api_config(rig.api);
    config.exec = (struct op_exec){.command = (char *)(uintptr_t) "/bin/sh",
                                   .args = {script, (char *)(uintptr_t) "-", folder},
                                   .env = {(char *)(uintptr_t) "EXTRA=a value"},
                                   .api_version = (char *)(uintptr_t) "client.authentication.k8s.io/v1"};
    rig_start_with(&rig, &config, NULL);
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    write_text(token, "plug-2");
    fake_api_set_token(rig.api, "plug-2");
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    CU_ASSERT_EQUAL(answer.tries, 2);
    FILE *file = fopen(count, "r");
    char line[16];
    int runs = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        runs++;
    }
    if (file != NULL) {
        fclose(file);
    }
    CU_ASSERT_EQUAL(runs, 2); /* Not once a request. */
    unlink(count);
    rig_stop(&rig);

    /* A plugin that fails, and one that is not there: requests end at their deadline and say why. */
    static const char *const commands[] = {"/bin/false", "/nowhere/plugin"};
    for (size_t i = 0; i < DL_COUNT_OF(commands); i++) {
        rig.api = fake_api_start(NULL);
        config = fake_api_config(rig.api);
        config.exec = (struct op_exec){.command = (char *)(uintptr_t)commands[i],
                                       .install_hint = (char *)(uintptr_t) "install it from there",
                                       .api_version = (char *)(uintptr_t) "client.authentication.k8s.io/v1"};
        rig_start_with(&rig, &config, NULL);
        struct op_reply_to to = rig_to(&answer);
        struct op_request request = {
            .method = "GET", .path = RIG_POD_PATH, .timeout_ms = 700, .done = to.done, .context = to.context};
        CU_ASSERT_EQUAL(op_client_send(rig.client, &request, NULL, NULL), DL_OK);
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
        CU_ASSERT_EQUAL(answer.rc, DL_ETIMEOUT);
        CU_ASSERT_PTR_NOT_NULL(strstr(answer.text, commands[i]));
        CU_ASSERT_EQUAL(fake_api_requests(rig.api, NULL, NULL), 0);
        rig_stop(&rig);
    }
    unlink(script);
    unlink(token);
    rmdir(folder);
}

/* TLS: the server's certificate is checked against the CA, ours is shown, and a wrong CA or name is a failure. */
static void test_tls(void)
{
    struct rig rig;
    struct rig_answer answer;
    char folder[] = "/tmp/kube-tls-XXXXXX", ca[64], cert[64], key[64];
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(folder));
    fake_certificate(folder, "server", "IP:127.0.0.1");
    fake_certificate(folder, "named", "DNS:kubernetes.default");
    fake_certificate(folder, "client", "DNS:operator");
    snprintf(ca, sizeof ca, "%s/server.pem", folder);
    snprintf(cert, sizeof cert, "%s/client.pem", folder);
    snprintf(key, sizeof key, "%s/client.key", folder);
    SSL_CTX *tls = fake_server_tls(folder, "server", true);
    rig.api = fake_api_start(tls);
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    struct op_config config = fake_api_config(rig.api);
    config.ca_file = ca;
    config.cert_file = cert;
    config.key_file = key;
    rig_start_with(&rig, &config, NULL);
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    CU_ASSERT_EQUAL(fake_api_connections(rig.api), 1);
    op_client_free(rig.client);
    op_loop_free(rig.loop);

    /* Without our certificate, and with another CA: refused. */
    struct op_config wrong[] = {config, config};
    wrong[0].cert_file = wrong[0].key_file = NULL;
    wrong[1].ca_file = cert;
    for (size_t i = 0; i < DL_COUNT_OF(wrong); i++) {
        rig_start_with(&rig, &wrong[i], NULL);
        CU_ASSERT_EQUAL(rig_get_once(&rig, &answer), DL_ENET);
        CU_ASSERT_EQUAL(answer.status, 0);
        op_client_free(rig.client);
        op_loop_free(rig.loop);
    }
    fake_api_stop(rig.api);
    SSL_CTX_free(tls);

    /* A certificate for another name passes when that name is configured. */
    tls = fake_server_tls(folder, "named", false);
    rig.api = fake_api_start(tls);
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    config = fake_api_config(rig.api);
    snprintf(ca, sizeof ca, "%s/named.pem", folder);
    config.ca_file = ca;
    config.tls_server_name = (char *)(uintptr_t) "kubernetes.default";
    rig_start_with(&rig, &config, NULL);
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    rig_stop(&rig);
    SSL_CTX_free(tls);
    fake_certificate_remove(folder, "server");
    fake_certificate_remove(folder, "named");
    fake_certificate_remove(folder, "client");
    rmdir(folder);
}

UNIT_MAIN("kube_auth", {"token is read again", test_token_is_read_again}, {"exec plugin", test_exec_plugin},
          {"tls", test_tls})
