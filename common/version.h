/* The version of all programs and of the chart.
 *
 * Pure. Layer common. */
#ifndef DL_COMMON_VERSION_H
#define DL_COMMON_VERSION_H

#define DL_VERSION "0.1.0"

#endif
