#include "common/enum_names.h"

#include "common/spec_table.h"

#define NAME_OF(function, type, path)                                                                                  \
    const char *function(type value)                                                                                   \
    {                                                                                                                  \
        return dl_spec_enum_name(path, (int)value);                                                                    \
    }

NAME_OF(dl_codec_name, enum dl_codec, "sync.compression")
NAME_OF(dl_data_format_name, enum dl_data_format, "training.data.format")
NAME_OF(dl_layout_kind_name, enum dl_layout_kind, "sync.layout")
NAME_OF(dl_sync_mode_name, enum dl_sync_mode, "sync.mode")
NAME_OF(dl_grace_mode_name, enum dl_grace_mode, "sync.grace.mode")
NAME_OF(dl_merge_method_name, enum dl_merge_method, "sync.merge.method")
NAME_OF(dl_weighting_name, enum dl_weighting, "sync.merge.weighting")
NAME_OF(dl_outer_type_name, enum dl_outer_type, "sync.outerOptimizer.type")
NAME_OF(dl_apply_mode_name, enum dl_apply_mode, "sync.apply")

#define FROM_NAME(function, type, path)                                                                                \
    bool function(const char *name, type *out)                                                                         \
    {                                                                                                                  \
        int value;                                                                                                     \
        bool is_known = dl_spec_enum_value(path, name, &value);                                                        \
        if (is_known) {                                                                                                \
            *out = (type)value;                                                                                        \
        }                                                                                                              \
        return is_known;                                                                                               \
    }

FROM_NAME(dl_codec_from_name, enum dl_codec, "sync.compression")
FROM_NAME(dl_layout_kind_from_name, enum dl_layout_kind, "sync.layout")
FROM_NAME(dl_merge_method_from_name, enum dl_merge_method, "sync.merge.method")
FROM_NAME(dl_outer_type_from_name, enum dl_outer_type, "sync.outerOptimizer.type")
