/* Shared by the sources that render objects only: building trees of JSON. A NULL parent is passed over, so that only the
 * root has to be checked. */
#ifndef OP_RECONCILE_OBJECTS_INTERNAL_H
#define OP_RECONCILE_OBJECTS_INTERNAL_H

#include <cjson/cJSON.h>

#include "operator/reconcile/objects.h"

/* The member `key` of `parent`, made when it is missing or of another kind. `parent` NULL gives NULL. */
cJSON *op_tree_object(cJSON *parent, const char *key);
cJSON *op_tree_array(cJSON *parent, const char *key);
/* Sets, in place of what was there. */
void op_tree_set(cJSON *parent, const char *key, cJSON *value);
void op_tree_text(cJSON *parent, const char *key, const char *value);
void op_tree_number(cJSON *parent, const char *key, double value);
void op_tree_bool(cJSON *parent, const char *key, bool value);
/* The same where nothing is set yet. */
void op_tree_text_if_missing(cJSON *parent, const char *key, const char *value);
void op_tree_number_if_missing(cJSON *parent, const char *key, double value);
void op_tree_bool_if_missing(cJSON *parent, const char *key, bool value);
cJSON *op_tree_append(cJSON *array); /* A new object at the end. */
/* The object in `array` whose "name" it is, or NULL. */
cJSON *op_tree_named(const cJSON *array, const char *name);

/* Labels and owner of an object; `component` is "learner", "syncer", "evaluator" or "job". */
void op_render_labels(const struct op_render *render, cJSON *labels, const char *component);
void op_render_owner(const struct op_render *render, cJSON *metadata);

/* The pod template of the syncers. */
DL_MUST_CHECK enum dl_rc op_render_syncer_template(const struct op_render *render, cJSON *into, struct dl_err *err);

#endif
