/* The smallest trainer that joins an ensemble: fits y = w x + b by gradient descent, a little of it on each learner.
 *
 *     cc minimal.c -ldiloco -o minimal && ./minimal demo ws://127.0.0.1:7700 "$(cat token)"
 */
#include <stdio.h>
#include <stdlib.h>

#include "worker/link/diloco.h" /* Installed: <diloco.h> */

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: minimal JOB ENDPOINTS [TOKEN]\n");
        return 2;
    }
    float w[1] = {0}, b[1] = {0};
    const uint64_t shape[1] = {1};
    struct diloco *d = NULL;
    struct diloco_info info;
    struct diloco_error error;
    struct diloco_options options = {.struct_size = sizeof options,
                                     .job = argv[1],
                                     .endpoints = argv[2],
                                     .token = argc > 3 ? argv[3] : NULL,
                                     .learner = -1};

    int result = diloco_open(&options, &d, &error);
    if (result == DILOCO_CONTINUE) {
        result = diloco_register(d, "w", w, 1, shape, DILOCO_WEIGHT, 1, &error);
    }
    if (result == DILOCO_CONTINUE) {
        result = diloco_register(d, "b", b, 1, shape, DILOCO_WEIGHT, 1, &error);
    }
    if (result == DILOCO_CONTINUE) {
        result = diloco_join(d, &info, &error); /* w and b are the ensemble's now. */
    }
    unsigned int seed = 1;
    while (result == DILOCO_CONTINUE) {
        float x = (float)(rand_r(&seed) % 2001 - 1000) / 1000.0f, y = 3.0f * x + 0.5f;
        float off = w[0] * x + b[0] - y;
        w[0] -= 0.05f * 2.0f * off * x;
        b[0] -= 0.05f * 2.0f * off;
        result = diloco_step(d, 1, off * off, &info, &error); /* Exchanges what is due; never waits for the network. */
    }
    printf("%s: w %.3f, b %.3f\n", result >= 0 ? "finished" : error.text, (double)w[0], (double)b[0]);
    diloco_close(d);
    return result >= 0 ? 0 : 1;
}
