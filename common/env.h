/* Environment variables that the programs of a run hand to each other. */
#ifndef DL_COMMON_ENV_H
#define DL_COMMON_ENV_H

/* Folder in which workers of a run on one machine share what is costly to find out (worker/data/cache.h). */
#define DL_ENV_CACHE "DILOCO_CACHE_DIR"

#endif
