/* sim_faults: what goes wrong, how often. Pure.
 *
 * Mean times are of exponential distributions, in virtual seconds; 0: never. Shares are of 0..1. */
#ifndef DL_SIM_FAULTS_H
#define DL_SIM_FAULTS_H

#include <stdint.h>

#include "common/rng.h"

struct sim_faults {
    /* The network: every connection has this one-way delay, jittered by up to its own length. */
    double delay_seconds;
    double chunk_seconds;      /* Time a chunk takes to go out. */
    double cut_mean_seconds;   /* Between two cuts of one connection; what is on its way is lost. */
    double notice_seconds;     /* After a cut each end notices within this; else by its timeout (half open). */
    double half_open_share;    /* Cuts that one end does not notice by itself. */
    double block_mean_seconds; /* Between two blockages of a connection: all is held, then delivered. */
    double block_seconds;      /* How long, at most. */
    /* Learners. */
    double kill_mean_seconds;  /* Each; a new incarnation starts later. */
    double goodbye_share;      /* Kills that give notice. */
    double restart_seconds;    /* At most. */
    double stall_mean_seconds; /* SIGSTOP of each ... */
    double stall_seconds;      /* ... for at most this. */
    double slow_share;         /* Learners that are `slow_factor` times slower than the rest. */
    double slow_factor;
    double step_seconds; /* Of the others, jittered by a quarter. */
    double late_share;   /* Learners that join later, within `late_seconds`. */
    double late_seconds;
    /* Pushes. */
    double damage_share; /* With a wrong checksum. */
    double nan_share;
    double absurd_share; /* Delta norm a million times too large. */
    double repeat_share; /* Announced once more after they arrived. */
    /* Syncers. */
    double crash_mean_seconds; /* Each; restarts from its last durable state. */
    double drain_share;        /* Of these, those that are asked to leave and save first. */
    double pause_mean_seconds; /* SIGSTOP of each ... */
    double pause_seconds;
    double merge_seconds, commit_seconds; /* At most. */
    double full_disk_share;               /* Commits that have to be tried again. */
};

/* No faults at all: a tame network, equal learners. */
void sim_faults_none(struct sim_faults *faults);
/* Rates drawn from a generator: each kind of fault is there in about half of all draws. */
void sim_faults_draw(struct sim_faults *faults, struct dl_rng *rng);
/* Keeps speeds and delays, and stops everything that breaks. */
void sim_faults_heal(struct sim_faults *faults);

double sim_exponential(struct dl_rng *rng, double mean);
double sim_uniform(struct dl_rng *rng, double low, double high);

#endif
