/* A core under test, with its time, its members as the test moves them, and the actions of the last event.
 *
 * rig_event ends every event: it takes all actions into rig.actions and checks the invariants. */
#ifndef DL_TESTS_CORE_RIG_H
#define DL_TESTS_CORE_RIG_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "syncer/core/core.h"
#include "tests/unit/unit.h"

#define RIG_ACTIONS_MAX 4096
#define RIG_MEMBERS_MAX 64
#define RIG_BYTES 1024 /* Of every push. */
#define RIG_MS INT64_C(1000000)
#define RIG_SECOND INT64_C(1000000000)
#define RIG_STEP_TOKENS 100

struct rig_member { /* As the learner would know it. */
    uint64_t step, tokens;
    uint64_t version[16], applied_step[16], applied_tokens[16];
    uint64_t busy_ns, transfer;
};

struct rig {
    struct dl_spec *spec;
    struct sy_core *core;
    int64_t now_ns;
    int64_t step_ns;
    struct sy_action actions[RIG_ACTIONS_MAX];
    uint32_t count;
    struct rig_member members[RIG_MEMBERS_MAX];
    struct dl_wire_welcome welcome;
    struct dl_wire_refuse refuse;
};

static const char rig_manifest[] =
    "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: rig}\n"
    "spec:\n  training: {tokenBudget: 1000000000, data: {paths: [x]}}\n"
    "  sync: {fragments: 4, interval: 8, overlap: 2, warmup: {steps: 0}, quorum: 1, grace: {mode: none}}\n"
    "  learners: {min: 1, replicas: 4, max: 8}\n";

static inline void rig_event(struct rig *rig)
{
    rig->count = 0;
    while (sy_core_next_action(rig->core, &rig->actions[rig->count])) {
        rig->count++;
        CU_ASSERT_FATAL(rig->count < RIG_ACTIONS_MAX);
    }
    const char *fault = sy_core_check(rig->core);
    if (fault != NULL) {
        printf("invariant: %s\n", fault);
    }
    CU_ASSERT_PTR_NULL_FATAL(fault);
}

/* Specs are changed between rig_spec and rig_start. */
static inline struct rig *rig_spec(void)
{
    struct rig *rig = calloc(1, sizeof *rig);
    CU_ASSERT_PTR_NOT_NULL_FATAL(rig);
    struct dl_err err;
    enum dl_rc rc = dl_spec_parse(rig_manifest, sizeof rig_manifest - 1, "rig", &rig->spec, NULL, &err);
    if (rc != DL_OK) {
        printf("%s\n", err.text);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    rig->now_ns = 1000 * RIG_SECOND;
    rig->step_ns = RIG_SECOND / 10;
    return rig;
}

static inline struct rig *rig_start(struct rig *rig)
{
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(
        sy_core_new(&(struct sy_core_config){.spec = rig->spec, .shard = 0, .epoch = 7}, &rig->core, &err), DL_OK);
    return rig;
}

static inline void rig_free(struct rig *rig)
{
    sy_core_free(rig->core);
    dl_spec_free(rig->spec);
    free(rig);
}

static inline uint32_t rig_count(const struct rig *rig, enum sy_action_type type)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < rig->count; i++) {
        count += rig->actions[i].type == type ? 1 : 0;
    }
    return count;
}

/* The n-th action of a type, or NULL. */
static inline const struct sy_action *rig_action(const struct rig *rig, enum sy_action_type type, uint32_t n)
{
    for (uint32_t i = 0; i < rig->count; i++) {
        if (rig->actions[i].type == type && n-- == 0) {
            return &rig->actions[i];
        }
    }
    return NULL;
}

static inline const struct dl_wire_pull *rig_pull(const struct rig *rig, uint32_t member, uint32_t fragment)
{
    for (uint32_t i = 0; i < rig->count; i++) {
        const struct sy_action *action = &rig->actions[i];
        if (action->type == SY_ACT_PULL && action->member == member && action->fragment == fragment) {
            return &action->as.pull;
        }
    }
    return NULL;
}

/* Its verdict, or -1. */
static inline int rig_result(const struct rig *rig, uint32_t member)
{
    for (uint32_t i = 0; i < rig->count; i++) {
        if (rig->actions[i].type == SY_ACT_RESULT && rig->actions[i].member == member) {
            return rig->actions[i].as.result.verdict;
        }
    }
    return -1;
}

/* Whether a warning says this. */
static inline bool rig_warns(const struct rig *rig, const char *what)
{
    for (uint32_t i = 0; i < rig->count; i++) {
        const struct sy_action *action = &rig->actions[i];
        if (action->type == SY_ACT_NOTE && action->warn && strstr(action->text, what) != NULL) {
            return true;
        }
    }
    return false;
}

static inline struct sy_core_view rig_view(const struct rig *rig)
{
    struct sy_core_view view;
    sy_core_view(rig->core, rig->now_ns, &view);
    return view;
}

static inline uint64_t rig_version(const struct rig *rig, uint32_t fragment)
{
    struct sy_fragment_view view;
    CU_ASSERT_TRUE_FATAL(sy_core_fragment(rig->core, fragment, &view));
    return view.version;
}

static inline void rig_tick(struct rig *rig, int64_t later_ns)
{
    rig->now_ns += later_ns;
    sy_core_tick(rig->core, rig->now_ns);
    rig_event(rig);
}

/* --- learners --- */

static inline struct dl_wire_hello rig_hello_of(const struct rig *rig, int32_t learner, uint64_t nonce)
{
    struct dl_wire_hello hello = {.role = DL_ROLE_LEARNER, .learner = learner, .nonce = nonce};
    snprintf(hello.uid, sizeof hello.uid, "pod-%d", learner);
    snprintf(hello.job, sizeof hello.job, "%s", rig->spec->name);
    return hello;
}

static inline enum dl_rc rig_hello(struct rig *rig, const struct dl_wire_hello *hello, uint32_t *member)
{
    *member = SY_NO_MEMBER;
    enum dl_rc rc = sy_core_on_hello(rig->core, rig->now_ns, hello, member, &rig->welcome, &rig->refuse);
    rig_event(rig);
    return rc;
}

/* A learner with this id; its nonce is the id + 100. Fails the test when refused. */
static inline uint32_t rig_join(struct rig *rig, int32_t learner)
{
    uint32_t member;
    struct dl_wire_hello hello = rig_hello_of(rig, learner, (uint64_t)(learner + 100));
    CU_ASSERT_EQUAL_FATAL(rig_hello(rig, &hello, &member), DL_OK);
    CU_ASSERT_FATAL(member < RIG_MEMBERS_MAX);
    rig->members[member] = (struct rig_member){0};
    return member;
}

/* The same process says hello again, with what it holds. */
static inline enum dl_rc rig_rejoin(struct rig *rig, uint32_t member, int32_t learner, uint32_t *got)
{
    const struct rig_member *m = &rig->members[member];
    struct dl_wire_hello hello = rig_hello_of(rig, learner, (uint64_t)(learner + 100));
    hello.step = m->step;
    hello.tokens = m->tokens;
    for (uint32_t p = 0; p < rig->spec->sync.fragments; p++) {
        if (p % rig->spec->syncer.shards == 0) {
            hello.fragments[hello.fragment_count++] =
                (struct dl_wire_fragment){.fragment = p,
                                          .version = m->version[p],
                                          .steps = (uint32_t)(m->step - m->applied_step[p]),
                                          .tokens = m->tokens - m->applied_tokens[p]};
        }
    }
    return rig_hello(rig, &hello, got);
}

static inline void rig_meta(struct rig *rig, uint32_t member)
{
    struct rig_member *m = &rig->members[member];
    struct dl_wire_meta meta = {
        .step = m->step, .tokens = m->tokens, .loss = 2.0f, .step_ns = (uint64_t)rig->step_ns, .busy_ns = m->busy_ns};
    for (uint32_t p = 0; p < rig->spec->sync.fragments; p++) {
        meta.fragments[meta.fragment_count++] =
            (struct dl_wire_fragment){.fragment = p,
                                      .version = m->version[p],
                                      .applied_step = m->applied_step[p],
                                      .steps = (uint32_t)(m->step - m->applied_step[p]),
                                      .tokens = m->tokens - m->applied_tokens[p]};
    }
    sy_core_on_meta(rig->core, rig->now_ns, member, &meta);
    rig_event(rig);
}

/* One step more, no update applied. */
static inline void rig_step(struct rig *rig, uint32_t member)
{
    rig->members[member].step++;
    rig->members[member].tokens += RIG_STEP_TOKENS;
    rig->members[member].busy_ns += (uint64_t)rig->step_ns;
    rig_meta(rig, member);
}

static inline void rig_apply(struct rig *rig, uint32_t member, uint32_t fragment)
{
    struct rig_member *m = &rig->members[member];
    m->version[fragment] = rig_version(rig, fragment);
    m->applied_step[fragment] = m->step;
    m->applied_tokens[fragment] = m->tokens;
}

static inline struct dl_wire_push rig_push_of(const struct rig *rig, uint32_t member, uint32_t fragment, uint64_t round)
{
    const struct rig_member *m = &rig->members[member];
    return (struct dl_wire_push){.transfer = 1,
                                 .round = round,
                                 .fragment = fragment,
                                 .base_version = m->version[fragment],
                                 .step = m->step,
                                 .steps = (uint32_t)(m->step - m->applied_step[fragment]),
                                 .tokens = m->tokens - m->applied_tokens[fragment],
                                 .bytes = RIG_BYTES};
}

static inline enum dl_verdict rig_announce(struct rig *rig, uint32_t member, const struct dl_wire_push *push)
{
    enum dl_verdict verdict = sy_core_on_push(rig->core, rig->now_ns, member, push, RIG_BYTES);
    rig_event(rig);
    return verdict;
}

static inline void rig_received(struct rig *rig, uint32_t member, uint32_t fragment, uint64_t round, double norm)
{
    sy_core_on_push_received(rig->core, rig->now_ns, member, round, fragment, true, norm);
    rig_event(rig);
}

/* Announces and delivers. */
static inline enum dl_verdict rig_push(struct rig *rig, uint32_t member, uint32_t fragment, uint64_t round, double norm)
{
    struct dl_wire_push push = rig_push_of(rig, member, fragment, round);
    enum dl_verdict verdict = rig_announce(rig, member, &push);
    if (verdict == DL_VERDICT_ACCEPTED) {
        rig_received(rig, member, fragment, round, norm);
    }
    return verdict;
}

static inline void rig_commit(struct rig *rig, uint32_t fragment)
{
    sy_core_on_committed(rig->core, rig->now_ns, fragment, RIG_MS, RIG_MS);
    rig_event(rig);
}

/* Takes the job from nothing to version 1 everywhere, with learners 0 .. count-1 as members 0 .. count-1. */
static inline void rig_seed(struct rig *rig, uint32_t count)
{
    struct dl_wire_pull pulls[16];
    uint32_t fragments = rig->spec->sync.fragments;
    for (uint32_t n = 0; n < count; n++) {
        CU_ASSERT_EQUAL_FATAL(rig_join(rig, (int32_t)n), n);
        for (uint32_t p = 0; n == 0 && p < fragments; p++) {
            const struct dl_wire_pull *pull = rig_pull(rig, 0, p);
            CU_ASSERT_PTR_NOT_NULL_FATAL(pull);
            pulls[p] = *pull;
        }
    }
    for (uint32_t p = 0; p < fragments; p++) {
        CU_ASSERT_EQUAL_FATAL(rig_push(rig, 0, p, pulls[p].round, 1), DL_VERDICT_ACCEPTED);
    }
    for (uint32_t p = 0; p < fragments; p++) {
        rig_commit(rig, p);
    }
    for (uint32_t n = 0; n < count; n++) {
        for (uint32_t p = 0; p < fragments; p++) {
            rig_apply(rig, n, p);
        }
        rig_meta(rig, n);
    }
}

/* --- whole rounds --- */

/* Steps all learners once; the round that opens in between, if any. */
static inline const struct sy_action *rig_step_all(struct rig *rig, uint32_t count, struct sy_action *opened)
{
    opened->type = SY_ACT_NOTE;
    for (uint32_t n = 0; n < count; n++) {
        rig_step(rig, n);
        const struct sy_action *pull = rig_action(rig, SY_ACT_PULL, 0);
        if (pull != NULL && opened->type != SY_ACT_PULL) {
            *opened = *pull;
        }
    }
    return opened->type == SY_ACT_PULL ? opened : NULL;
}

/* Steps until a round opens; its pull. */
static inline struct dl_wire_pull rig_open_round(struct rig *rig, uint32_t count)
{
    struct sy_action opened;
    for (uint32_t i = 0; i < 200; i++) {
        if (rig_step_all(rig, count, &opened) != NULL) {
            return opened.as.pull;
        }
    }
    CU_FAIL_FATAL("no round opened in 200 steps");
    return opened.as.pull;
}

static inline void rig_merge_all(struct rig *rig, uint32_t count, const struct dl_wire_pull *pull)
{
    for (uint32_t n = 0; n < count; n++) {
        rig_push(rig, n, pull->fragment, pull->round, 1);
    }
    rig_commit(rig, pull->fragment);
    for (uint32_t n = 0; n < count; n++) {
        rig_apply(rig, n, pull->fragment);
    }
}

static inline struct rig *rig_start_grace(enum dl_grace_mode mode, double overlap_steps)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.grace.mode = mode;
    rig->spec->sync.grace.margin = 0.5;
    rig->spec->sync.grace.max_seconds = 0.7;
    rig->spec->sync.overlap = (uint32_t)overlap_steps;
    rig_start(rig);
    rig_seed(rig, 3);
    return rig;
}

#endif
