#include "sim/faults.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

double sim_uniform(struct dl_rng *rng, double low, double high)
{
    return low + (high - low) * (double)dl_rng_uniform(rng);
}

double sim_exponential(struct dl_rng *rng, double mean)
{
    return -mean * log(1.0 - (double)dl_rng_uniform(rng));
}

void sim_faults_none(struct sim_faults *faults)
{
    memset(faults, 0, sizeof *faults);
    faults->delay_seconds = 0.001;
    faults->chunk_seconds = 0.001;
    faults->step_seconds = 0.25;
    faults->slow_factor = 1;
    faults->merge_seconds = faults->commit_seconds = 0.005;
}

static double sometimes(struct dl_rng *rng, double low, double high)
{
    return dl_rng_below(rng, 2) == 0 ? 0 : sim_uniform(rng, low, high);
}

void sim_faults_draw(struct sim_faults *faults, struct dl_rng *rng)
{
    sim_faults_none(faults);
    faults->delay_seconds = pow(10, sim_uniform(rng, -4, -0.5));
    faults->chunk_seconds = pow(10, sim_uniform(rng, -4, -1));
    faults->cut_mean_seconds = sometimes(rng, 3, 30);
    faults->notice_seconds = sim_uniform(rng, 0, 2);
    faults->half_open_share = sometimes(rng, 0, 1);
    faults->block_mean_seconds = sometimes(rng, 5, 30);
    faults->block_seconds = sim_uniform(rng, 0.1, 8);
    faults->kill_mean_seconds = sometimes(rng, 10, 60);
    faults->goodbye_share = sim_uniform(rng, 0, 1);
    faults->restart_seconds = sim_uniform(rng, 0.1, 10);
    faults->stall_mean_seconds = sometimes(rng, 10, 60);
    faults->stall_seconds = sim_uniform(rng, 0.5, 15);
    faults->slow_share = sometimes(rng, 0, 0.6);
    faults->slow_factor = sim_uniform(rng, 2, 8);
    faults->step_seconds = pow(10, sim_uniform(rng, -1, 0));
    faults->late_share = sometimes(rng, 0, 0.5);
    faults->late_seconds = sim_uniform(rng, 1, 20);
    faults->damage_share = sometimes(rng, 0, 0.1);
    faults->nan_share = sometimes(rng, 0, 0.1);
    faults->absurd_share = sometimes(rng, 0, 0.1);
    faults->repeat_share = sometimes(rng, 0, 0.5);
    faults->crash_mean_seconds = sometimes(rng, 10, 60);
    faults->drain_share = sometimes(rng, 0, 1);
    faults->pause_mean_seconds = sometimes(rng, 10, 60);
    faults->pause_seconds = sim_uniform(rng, 0.1, 8);
    faults->merge_seconds = pow(10, sim_uniform(rng, -3, 0));
    faults->commit_seconds = pow(10, sim_uniform(rng, -3, 0.3));
    faults->full_disk_share = sometimes(rng, 0, 0.2);
}

void sim_faults_heal(struct sim_faults *faults)
{
    faults->cut_mean_seconds = faults->block_mean_seconds = faults->kill_mean_seconds = 0;
    faults->stall_mean_seconds = faults->crash_mean_seconds = faults->pause_mean_seconds = 0;
    faults->damage_share = faults->nan_share = faults->absurd_share = faults->full_disk_share = 0;
}
