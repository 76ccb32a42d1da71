/* Exit codes of all programs: whoever supervises them decides by the code alone whether to start them again. */
#ifndef DL_COMMON_EXIT_CODES_H
#define DL_COMMON_EXIT_CODES_H

enum dl_exit {
    DL_EXIT_OK = 0,      /* Finished, or stopped as asked. */
    DL_EXIT_FAILED = 1,  /* Failed in a way that may pass: can be started again. */
    DL_EXIT_USAGE = 2,   /* Wrong arguments or input: starting again cannot help. */
    DL_EXIT_REFUSED = 3, /* Refused by the syncer for good: starting again cannot help. */
    DL_EXIT_TIMEOUT = 4, /* A bound was reached. */
    DL_EXIT_SAVED = 5,   /* A syncer was asked to leave before the job's end: its state is safe, start another. */
};

#endif
