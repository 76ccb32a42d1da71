/* Certificates and server contexts for tests of TLS, made on the spot. */
#ifndef DL_TESTS_FAKE_TLS_H
#define DL_TESTS_FAKE_TLS_H

#include <assert.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* A self-signed certificate for `name`, and its key, in files below `folder`. */
static inline void fake_certificate(const char *folder, const char *stem, const char *name)
{
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *cert = X509_new();
    X509_set_version(cert, X509_VERSION_3);
    ASN1_INTEGER_set(X509_get_serialNumber(cert), 1);
    X509_gmtime_adj(X509_getm_notBefore(cert), -3600);
    X509_gmtime_adj(X509_getm_notAfter(cert), 3600);
    X509_set_pubkey(cert, key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(cert), "CN", MBSTRING_ASC, (const uint8_t *)"test", -1, -1, 0);
    X509_set_issuer_name(cert, X509_get_subject_name(cert));
    X509_EXTENSION *san = X509V3_EXT_conf_nid(NULL, NULL, NID_subject_alt_name, name);
    assert(san != NULL);
    X509_add_ext(cert, san, -1);
    X509_EXTENSION_free(san);
    X509_sign(cert, key, EVP_sha256());
    char path[256];
    snprintf(path, sizeof path, "%s/%s.pem", folder, stem);
    FILE *file = fopen(path, "w");
    PEM_write_X509(file, cert);
    fclose(file);
    snprintf(path, sizeof path, "%s/%s.key", folder, stem);
    file = fopen(path, "w");
    PEM_write_PrivateKey(file, key, NULL, NULL, 0, NULL, NULL);
    fclose(file);
    X509_free(cert);
    EVP_PKEY_free(key);
}

static inline SSL_CTX *fake_server_tls(const char *folder, const char *stem, bool ask_client)
{
    char cert[256], key[256], ca[256];
    snprintf(cert, sizeof cert, "%s/%s.pem", folder, stem);
    snprintf(key, sizeof key, "%s/%s.key", folder, stem);
    snprintf(ca, sizeof ca, "%s/client.pem", folder);
    SSL_CTX *tls = SSL_CTX_new(TLS_server_method());
    if (SSL_CTX_use_certificate_chain_file(tls, cert) != 1) {
        abort();
    }
    if (SSL_CTX_use_PrivateKey_file(tls, key, SSL_FILETYPE_PEM) != 1) {
        abort();
    }
    if (ask_client) {
        if (SSL_CTX_load_verify_locations(tls, ca, NULL) != 1) {
            abort();
        }
        SSL_CTX_set_verify(tls, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    }
    return tls;
}

static inline void fake_certificate_remove(const char *folder, const char *stem)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s.pem", folder, stem);
    unlink(path);
    snprintf(path, sizeof path, "%s/%s.key", folder, stem);
    unlink(path);
}

#endif
