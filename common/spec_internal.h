/* Parts of the job spec that its own files share. */
#ifndef DL_COMMON_SPEC_INTERNAL_H
#define DL_COMMON_SPEC_INTERNAL_H

#include "common/spec.h"
#include "common/spec_table.h"
#include "common/yaml.h"

/* Reads `text` as a value of `field` into its place below `base`. `quoted`: it stood in quotes. The error text has the
 * value and what is allowed; the caller puts the path in front. */
DL_MUST_CHECK enum dl_rc dl_field_set(const struct dl_field *field, void *base, const char *text, bool quoted,
                                      struct dl_err *err);

/* Rules between fields: fills what is derived from others, refuses what cannot work, warns of what will disappoint.
 * `has_replicas`: learners.replicas stands in the manifest. */
DL_MUST_CHECK enum dl_rc dl_spec_check(struct dl_spec *spec, bool has_replicas, struct dl_spec_warnings *warnings,
                                       struct dl_err *err);

/* Lower-case letters, digits, '-', not at either end; at most 63. */
bool dl_is_dns_label(const char *text);

#endif
