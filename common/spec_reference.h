/* The job reference for people, made from the table of fields. Pure; any thread. */
#ifndef DL_COMMON_SPEC_REFERENCE_H
#define DL_COMMON_SPEC_REFERENCE_H

#include "common/buf.h"

/* Appends docs/job-reference.md. */
void dl_spec_reference(struct dl_buf *out);

#endif
