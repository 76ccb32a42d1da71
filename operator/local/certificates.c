#include "operator/local/certificates.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"

#define DAY_SECONDS 86400L
#define NAMES "IP:127.0.0.1,IP:::1,DNS:localhost"

struct identity { /* A key and the certificate for it. */
    EVP_PKEY *key;
    X509 *certificate;
};

static void release(struct identity *identity)
{
    EVP_PKEY_free(identity->key);
    X509_free(identity->certificate);
}

static bool extend(X509 *certificate, X509 *issuer, int kind, const char *value)
{
    X509V3_CTX context;
    X509V3_set_ctx_nodb(&context);
    X509V3_set_ctx(&context, issuer, certificate, NULL, NULL, 0);
    X509_EXTENSION *extension = X509V3_EXT_conf_nid(NULL, &context, kind, value);
    bool is_added = extension != NULL && X509_add_ext(certificate, extension, -1) == 1;
    X509_EXTENSION_free(extension);
    return is_added;
}

static bool number(X509 *certificate)
{
    uint64_t serial = 0;
    return RAND_bytes((unsigned char *)&serial, sizeof serial) == 1 &&
           ASN1_INTEGER_set_uint64(X509_get_serialNumber(certificate), serial >> 1 | 1) == 1;
}

/* What all of them have: a key, a number, a name, a time. */
static bool begin(struct identity *identity, const char *name)
{
    identity->key = EVP_EC_gen("P-256");
    identity->certificate = X509_new();
    X509 *certificate = identity->certificate;
    return identity->key != NULL && certificate != NULL && X509_set_version(certificate, X509_VERSION_3) == 1 &&
           number(certificate) && X509_gmtime_adj(X509_getm_notBefore(certificate), -DAY_SECONDS) != NULL &&
           X509_gmtime_adj(X509_getm_notAfter(certificate), OP_CERTIFICATE_DAYS * DAY_SECONDS) != NULL &&
           X509_set_pubkey(certificate, identity->key) == 1 &&
           X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_UTF8,
                                      (const unsigned char *)name, -1, -1, 0) == 1;
}

static bool make_authority(struct identity *authority)
{
    X509 *own = NULL;
    if (!begin(authority, "diloco run")) {
        return false;
    }
    own = authority->certificate;
    return X509_set_issuer_name(own, X509_get_subject_name(own)) == 1 &&
           extend(own, own, NID_basic_constraints, "critical,CA:TRUE,pathlen:0") &&
           extend(own, own, NID_key_usage, "critical,keyCertSign") &&
           extend(own, own, NID_subject_key_identifier, "hash") && X509_sign(own, authority->key, EVP_sha256()) > 0;
}

static bool make_member(const struct identity *authority, const char *name, struct identity *member)
{
    X509 *issuer = authority->certificate;
    if (!begin(member, name)) {
        return false;
    }
    X509 *own = member->certificate;
    return X509_set_issuer_name(own, X509_get_subject_name(issuer)) == 1 &&
           extend(own, issuer, NID_basic_constraints, "critical,CA:FALSE") &&
           extend(own, issuer, NID_key_usage, "critical,digitalSignature") &&
           extend(own, issuer, NID_ext_key_usage, "serverAuth,clientAuth") &&
           extend(own, issuer, NID_subject_alt_name, NAMES) &&
           extend(own, issuer, NID_subject_key_identifier, "hash") &&
           extend(own, issuer, NID_authority_key_identifier, "keyid") &&
           X509_sign(own, authority->key, EVP_sha256()) > 0;
}

/* --- files --- */

/* A file that is there is one of an earlier try: it is replaced. */
static FILE *open_new(const struct op_rundir *dir, const char *name, mode_t mode, char path[OP_PATH_MAX])
{
    op_rundir_path(dir, name, path);
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (fd >= 0 && file == NULL) {
        close(fd);
    }
    return file;
}

static enum dl_rc close_written(FILE *file, bool is_written, const char *path, struct dl_err *err)
{
    bool is_closed = file != NULL && fclose(file) == 0;
    if (is_written && is_closed) {
        return DL_OK;
    }
    enum dl_rc rc = errno == EACCES ? DL_EDENIED : errno == ENOSPC ? DL_EFULL : DL_EIO;
    return dl_err_errno(err, rc, errno, "write %s", path);
}

static enum dl_rc write_certificate(const struct op_rundir *dir, const char *name, X509 *certificate,
                                    struct dl_err *err)
{
    char path[OP_PATH_MAX];
    FILE *file = open_new(dir, name, 0644, path);
    bool is_written = file != NULL && PEM_write_X509(file, certificate) == 1;
    return close_written(file, is_written, path, err);
}

static enum dl_rc write_key(const struct op_rundir *dir, const char *name, EVP_PKEY *key, struct dl_err *err)
{
    char path[OP_PATH_MAX];
    FILE *file = open_new(dir, name, 0600, path);
    bool is_written = file != NULL && PEM_write_PrivateKey(file, key, NULL, NULL, 0, NULL, NULL) == 1;
    return close_written(file, is_written, path, err);
}

static enum dl_rc write_member(const struct op_rundir *dir, const char *name, const struct identity *member,
                               struct dl_err *err)
{
    char file[32];
    snprintf(file, sizeof file, "tls/%s.pem", name);
    enum dl_rc rc = write_certificate(dir, file, member->certificate, err);
    snprintf(file, sizeof file, "tls/%s.key", name);
    return rc == DL_OK ? write_key(dir, file, member->key, err) : rc;
}

enum dl_rc op_certificates_make(const struct op_rundir *dir, struct dl_err *err)
{
    char path[OP_PATH_MAX];
    op_rundir_path(dir, "tls", path);
    if (mkdir(path, 0700) != 0 && errno != EEXIST) {
        return dl_err_errno(err, errno == EACCES ? DL_EDENIED : DL_EIO, errno, "make the folder %s", path);
    }
    struct identity authority = {0}, syncer = {0}, worker = {0};
    bool is_made = make_authority(&authority) && make_member(&authority, "syncer", &syncer) &&
                   make_member(&authority, "worker", &worker);
    enum dl_rc rc = is_made ? DL_OK : dl_err_set(err, DL_ENOMEM, "OpenSSL made no certificates for the run");
    rc = rc == DL_OK ? write_member(dir, "syncer", &syncer, err) : rc;
    rc = rc == DL_OK ? write_member(dir, "worker", &worker, err) : rc;
    /* The last one: its presence says that all are there. */
    rc = rc == DL_OK ? write_certificate(dir, "tls/ca.pem", authority.certificate, err) : rc;
    release(&authority);
    release(&syncer);
    release(&worker);
    return rc;
}

bool op_certificates_there(const struct op_rundir *dir, char ca[OP_PATH_MAX])
{
    op_rundir_path(dir, "tls/ca.pem", ca);
    if (access(ca, R_OK) != 0) {
        ca[0] = 0;
        return false;
    }
    return true;
}
