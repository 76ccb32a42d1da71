#include "operator/local/chaos.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

static const struct {
    const char *name;
    enum op_chaos_type type;
} names[] = {
    {"kill", OP_CHAOS_KILL}, {"kill-learner", OP_CHAOS_KILL}, {"kill-syncer", OP_CHAOS_KILL_SYNCER},
    {"join", OP_CHAOS_JOIN}, {"leave", OP_CHAOS_LEAVE},
};

static const char usage[] =
    "use kill@PERCENT%[:ID], kill-syncer@PERCENT%[:SHARD], join@PERCENT%[:COUNT], leave@PERCENT%[:COUNT]";

static bool parse_type(const char *text, size_t length, enum op_chaos_type *type)
{
    for (size_t i = 0; i < DL_COUNT_OF(names); i++) {
        if (strlen(names[i].name) == length && strncmp(names[i].name, text, length) == 0) {
            *type = names[i].type;
            return true;
        }
    }
    return false;
}

static enum dl_rc parse_action(const char *part, struct op_chaos_action *action, struct dl_err *err)
{
    *action = (struct op_chaos_action){0};
    const char *at = strchr(part, '@');
    if (at == NULL || !parse_type(part, (size_t)(at - part), &action->type)) {
        return dl_err_set(err, DL_EINVAL, "--chaos '%s': %s", part, usage);
    }
    char *end = NULL;
    double percent = strtod(at + 1, &end);
    bool is_number = at[1] >= '0' && at[1] <= '9'; /* Not "nan", not "0x1p3" from a sign or a blank. */
    if (!is_number || percent < 0 || percent > 100 || *end != '%' || (end[1] != 0 && end[1] != ':')) {
        return dl_err_set(err, DL_EINVAL, "--chaos '%s': after @ stands a percentage of the budget, 0%% to 100%%",
                          part);
    }
    action->at = percent / 100;
    if (end[1] == ':') {
        const char *digits = end + 2;
        errno = 0;
        unsigned long value = digits[0] >= '0' && digits[0] <= '9' ? strtoul(digits, &end, 10) : ULONG_MAX;
        if (errno != 0 || value > UINT32_MAX || *end != 0) {
            return dl_err_set(err, DL_EINVAL, "--chaos '%s': after : stands a number", part);
        }
        action->has_argument = true;
        action->argument = (uint32_t)value;
    }
    return DL_OK;
}

static enum dl_rc check_action(const struct op_chaos_action *action, const char *part, const struct dl_spec *spec,
                               struct dl_err *err)
{
    if (!action->has_argument) {
        return DL_OK;
    }
    switch (action->type) {
    case OP_CHAOS_KILL:
        if (action->argument >= spec->learners.max) {
            return dl_err_set(err, DL_EINVAL, "--chaos '%s': learner ids are 0 to %u (learners.max is %u)", part,
                              spec->learners.max - 1, spec->learners.max);
        }
        return DL_OK;
    case OP_CHAOS_KILL_SYNCER:
        if (action->argument >= spec->syncer.shards) {
            return dl_err_set(err, DL_EINVAL, "--chaos '%s': shards are 0 to %u", part, spec->syncer.shards - 1);
        }
        return DL_OK;
    case OP_CHAOS_JOIN:
    case OP_CHAOS_LEAVE:
        if (action->argument == 0 || action->argument > spec->learners.max) {
            return dl_err_set(err, DL_EINVAL, "--chaos '%s': a count of 1 to %u (learners.max)", part,
                              spec->learners.max);
        }
        return DL_OK;
    }
    return DL_OK;
}

/* Stable insertion by time. */
static void insert(struct op_chaos *chaos, const struct op_chaos_action *action)
{
    uint32_t at = chaos->count++;
    while (at > 0 && chaos->actions[at - 1].at > action->at) {
        chaos->actions[at] = chaos->actions[at - 1];
        at--;
    }
    chaos->actions[at] = *action;
}

enum dl_rc op_chaos_parse(const char *text, const struct dl_spec *spec, struct op_chaos *out, struct dl_err *err)
{
    if (spec->training.token_budget == 0 && spec->training.round_budget == 0) {
        return dl_err_set(err, DL_EINVAL, "--chaos needs a budget to measure progress by: set training.tokenBudget");
    }
    struct op_chaos chaos = {0};
    DL_AUTO_FREE char *copy = strdup(text);
    if (copy == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for --chaos");
    }
    for (char *part = copy, *next; part != NULL; part = next) {
        next = strchr(part, ',');
        if (next != NULL) {
            *next++ = 0;
        }
        if (chaos.count == OP_CHAOS_MAX) {
            return dl_err_set(err, DL_EINVAL, "--chaos takes at most %d actions", OP_CHAOS_MAX);
        }
        struct op_chaos_action action;
        enum dl_rc rc = parse_action(part, &action, err);
        if (rc == DL_OK) {
            rc = check_action(&action, part, spec, err);
        }
        if (rc != DL_OK) {
            return rc;
        }
        insert(&chaos, &action);
    }
    *out = chaos;
    return DL_OK;
}

const struct op_chaos_action *op_chaos_take(struct op_chaos *chaos, double progress)
{
    if (chaos->done == chaos->count || progress < chaos->actions[chaos->done].at) {
        return NULL;
    }
    return &chaos->actions[chaos->done++];
}
