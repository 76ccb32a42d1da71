/* op_certificates: the certificates of a run that speaks TLS on this machine, in folder tls/ of the run:
 *
 *     ca.pem  syncer.pem syncer.key  worker.pem worker.key
 *
 * An authority of the run's own signs one certificate for its syncers and one for its workers (joiners fetch a learner's
 * state from it), both for 127.0.0.1, ::1 and localhost; then its key is forgotten, so that nobody can ever sign another one.
 * Keys are for their owner alone (0600). File I/O; one thread. Layer operator/local. */
#ifndef OP_LOCAL_CERTIFICATES_H
#define OP_LOCAL_CERTIFICATES_H

#include <stdbool.h>

#include "operator/local/rundir.h"

#define OP_CERTIFICATE_DAYS 1825 /* Beyond any run, so that it can be resumed. */

/* Makes them all. DL_EIO, DL_EFULL, DL_EDENIED: a file cannot be written; DL_ENOMEM: OpenSSL has failed. */
DL_MUST_CHECK enum dl_rc op_certificates_make(const struct op_rundir *dir, struct dl_err *err);

/* Whether the run has certificates, which is to say that it speaks TLS. `ca` gets the authority's path, else "". */
bool op_certificates_there(const struct op_rundir *dir, char ca[OP_PATH_MAX]);

#endif
