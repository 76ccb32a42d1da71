#include "operator/local/report_chart.h"

#include <math.h>
#include <string.h>

#include "common/mem.h"
#include "operator/local/render.h"

struct scale {
    double low, high;   /* Of the losses, widened a little. */
    double first, last; /* Of the tokens. */
};

static struct scale scale_of(const struct op_view_point *points, uint32_t count)
{
    struct scale scale = {.low = INFINITY, .high = -INFINITY};
    for (uint32_t i = 0; i < count; i++) {
        scale.low = fmin(scale.low, points[i].loss);
        scale.high = fmax(scale.high, points[i].loss);
    }
    double margin = fmax((scale.high - scale.low) * 0.05, 1e-6);
    scale.low -= margin;
    scale.high += margin;
    scale.first = (double)points[0].tokens;
    scale.last = fmax((double)points[count - 1].tokens, scale.first + 1);
    return scale;
}

static double across(const struct scale *scale, const struct op_view_point *point)
{
    return fmin(1, fmax(0, ((double)point->tokens - scale->first) / (scale->last - scale->first)));
}

static double up(const struct scale *scale, const struct op_view_point *point)
{
    return (point->loss - scale->low) / (scale->high - scale->low);
}

void op_chart_text(FILE *out, const struct op_view_point *points, uint32_t count)
{
    enum { WIDTH = 72, HEIGHT = 14 };
    char cells[HEIGHT][WIDTH + 1];
    memset(cells, ' ', sizeof cells);
    struct scale scale = scale_of(points, count);
    for (uint32_t i = 0; i < count; i++) {
        int column = (int)lround(across(&scale, &points[i]) * (WIDTH - 1));
        int row = HEIGHT - 1 - (int)lround(up(&scale, &points[i]) * (HEIGHT - 1));
        cells[row][column] = '*';
    }
    for (int row = 0; row < HEIGHT; row++) {
        double loss = scale.high - (scale.high - scale.low) * row / (HEIGHT - 1);
        fprintf(out, "%8.3f |%.*s\n", loss, WIDTH, cells[row]);
    }
    char first[32], last[32];
    op_format_count(scale.first, first, sizeof first);
    op_format_count(scale.last, last, sizeof last);
    fprintf(out, "%8s +", "");
    for (int i = 0; i < WIDTH; i++) {
        fputc('-', out);
    }
    fprintf(out, "\n%8s  %-10s%*s tokens\n", "", first, WIDTH - 17, last);
}

void op_chart_svg(FILE *out, const struct op_view_point *points, uint32_t count)
{
    enum { WIDTH = 720, HEIGHT = 320, LEFT = 60, RIGHT = 20, TOP = 20, BOTTOM = 40, LINES = 5 };
    struct scale scale = scale_of(points, count);
    double plot_width = WIDTH - LEFT - RIGHT, plot_height = HEIGHT - TOP - BOTTOM;
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT, WIDTH, HEIGHT);
    for (int i = 0; i <= LINES; i++) {
        double share = (double)i / LINES;
        double y = TOP + plot_height * (1 - share), x = LEFT + plot_width * share;
        char tokens[32];
        op_format_count(scale.first + (scale.last - scale.first) * share, tokens, sizeof tokens);
        fprintf(out,
                "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#ddd\"/>"
                "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.2f</text>"
                "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
                LEFT, y, WIDTH - RIGHT, y, LEFT - 6, y + 4, scale.low + (scale.high - scale.low) * share, x,
                HEIGHT - BOTTOM + 18, tokens);
    }
    fprintf(out, "<polyline fill=\"none\" stroke=\"#1565c0\" stroke-width=\"2\" points=\"");
    for (uint32_t i = 0; i < count; i++) {
        fprintf(out, "%.1f,%.1f ", LEFT + plot_width * across(&scale, &points[i]),
                TOP + plot_height * (1 - up(&scale, &points[i])));
    }
    fprintf(out, "\"/>\n<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">tokens trained by all learners</text>\n",
            WIDTH / 2, HEIGHT - 6);
    fprintf(out, "<text x=\"%d\" y=\"14\">validation loss, nats a token</text>\n</svg>\n", LEFT);
}
