/* Names of the job's enums, as they stand in manifests, for logs, metrics, status and reports. The table of fields
 * (spec_table.h) is their only source. The value must be one of the enum's. Pure; any thread; the text is static. */
#ifndef DL_COMMON_ENUM_NAMES_H
#define DL_COMMON_ENUM_NAMES_H

#include "common/spec.h"

const char *dl_codec_name(enum dl_codec codec);
const char *dl_data_format_name(enum dl_data_format format);
const char *dl_layout_kind_name(enum dl_layout_kind kind);
const char *dl_sync_mode_name(enum dl_sync_mode mode);
const char *dl_grace_mode_name(enum dl_grace_mode mode);
const char *dl_merge_method_name(enum dl_merge_method method);
const char *dl_weighting_name(enum dl_weighting weighting);
const char *dl_outer_type_name(enum dl_outer_type type);
const char *dl_apply_mode_name(enum dl_apply_mode mode);

/* The way back: false, and nothing written, for any other text. */
bool dl_codec_from_name(const char *name, enum dl_codec *codec);
bool dl_layout_kind_from_name(const char *name, enum dl_layout_kind *kind);
bool dl_merge_method_from_name(const char *name, enum dl_merge_method *method);
bool dl_outer_type_from_name(const char *name, enum dl_outer_type *type);

#endif
