/* op_chart: validation loss over tokens, as text and as SVG. Pure but for the stream. Layer operator/local. */
#ifndef OP_LOCAL_REPORT_CHART_H
#define OP_LOCAL_REPORT_CHART_H

#include <stdint.h>
#include <stdio.h>

#include "operator/local/view.h"

/* At least two points, by tokens. */
void op_chart_text(FILE *out, const struct op_view_point *points, uint32_t count);
void op_chart_svg(FILE *out, const struct op_view_point *points, uint32_t count);

#endif
