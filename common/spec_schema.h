/* The CustomResourceDefinition of a job, made from the table of fields (spec_table.h) and the table of rules
 * (spec_check.c), so that the API server refuses what the parser refuses, and knows the same defaults.
 *
 * Numbers with a fraction are taken quoted or not, as by the parser; the bounds of those that are quoted are patterns
 * (spec_range.h). Pure; any thread. */
#ifndef DL_COMMON_SPEC_SCHEMA_H
#define DL_COMMON_SPEC_SCHEMA_H

#include "common/buf.h"
#include "common/err.h"

#define DL_SPEC_CRD_BYTES_MAX (256 * 1024)

/* Appends crds/decoupleddilocojobs.yaml. */
void dl_spec_crd_yaml(struct dl_buf *out);

#endif
