/* A naive Llama forward pass in double, to hold the trainer's kernels against. Slow and plain on purpose. */
#ifndef DL_TESTS_MODEL_REFERENCE_H
#define DL_TESTS_MODEL_REFERENCE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/layout.h"
#include "common/spec.h"

struct reference {
    const struct dl_model_spec *spec;
    const struct dl_tensor *tensors;
    double *const *values; /* By tensor. */
    uint32_t tensor_count;
};

static inline double *reference_tensor(const struct reference *reference, const char *name)
{
    for (uint32_t i = 0; i < reference->tensor_count; i++) {
        if (strcmp(reference->tensors[i].name, name) == 0) {
            return reference->values[i];
        }
    }
    fprintf(stderr, "no tensor %s\n", name);
    abort();
}

static inline double *reference_layer_tensor(const struct reference *reference, uint32_t layer, const char *name)
{
    char full[DL_TENSOR_NAME_MAX];
    snprintf(full, sizeof full, "model.layers.%u.%s.weight", layer, name);
    return reference_tensor(reference, full);
}

/* out[rows][n] = in[rows][k] weight[n][k]' */
static inline void reference_project(const double *in, const double *weight, uint32_t rows, uint32_t k, uint32_t n,
                                     double *out)
{
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t j = 0; j < n; j++) {
            double sum = 0;
            for (uint32_t i = 0; i < k; i++) {
                sum += in[r * k + i] * weight[j * k + i];
            }
            out[r * n + j] = sum;
        }
    }
}

static inline void reference_norm(const double *in, const double *gain, uint32_t rows, uint32_t width, double epsilon,
                                  double *out)
{
    for (uint32_t r = 0; r < rows; r++) {
        double squares = 0;
        for (uint32_t i = 0; i < width; i++) {
            squares += in[r * width + i] * in[r * width + i];
        }
        for (uint32_t i = 0; i < width; i++) {
            out[r * width + i] = in[r * width + i] / sqrt(squares / width + epsilon) * gain[i];
        }
    }
}

static inline void reference_rotate(double *x, uint32_t heads, uint32_t head_width, uint32_t rows, double theta)
{
    uint32_t half = head_width / 2;
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t h = 0; h < heads; h++) {
            double *head = x + (r * heads + h) * head_width;
            for (uint32_t i = 0; i < half; i++) {
                double angle = r * pow(theta, -2.0 * i / head_width);
                double a = head[i], b = head[i + half];
                head[i] = a * cos(angle) - b * sin(angle);
                head[i + half] = b * cos(angle) + a * sin(angle);
            }
        }
    }
}

/* Causal attention of one sequence; q[rows][heads][w], k and v[rows][kv_heads][w], already rotated. */
static inline void reference_attention(const double *q, const double *k, const double *v, uint32_t rows, uint32_t heads,
                                       uint32_t kv_heads, uint32_t w, double *out)
{
    double *scores = calloc(rows, sizeof *scores);
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t h = 0; h < heads; h++) {
            uint32_t g = h * kv_heads / heads;
            const double *query = q + (r * heads + h) * w;
            double *result = out + (r * heads + h) * w;
            double maximum = -INFINITY, sum = 0;
            for (uint32_t j = 0; j <= r; j++) {
                double dot = 0;
                for (uint32_t i = 0; i < w; i++) {
                    dot += query[i] * k[(j * kv_heads + g) * w + i];
                }
                scores[j] = dot / sqrt(w);
                maximum = fmax(maximum, scores[j]);
            }
            memset(result, 0, w * sizeof *result);
            for (uint32_t j = 0; j <= r; j++) {
                scores[j] = exp(scores[j] - maximum);
                sum += scores[j];
            }
            for (uint32_t j = 0; j <= r; j++) {
                for (uint32_t i = 0; i < w; i++) {
                    result[i] += scores[j] / sum * v[(j * kv_heads + g) * w + i];
                }
            }
        }
    }
    free(scores);
}

/* One layer over one sequence, x[rows][width] in place. */
static inline void reference_layer(const struct reference *reference, uint32_t layer, double *x)
{
    const struct dl_model_spec *s = reference->spec;
    uint32_t rows = s->sequence_length, width = s->width, w = width / s->heads, kv = s->kv_heads * w,
             ffn = s->ffn_width;
    double *normed = calloc((size_t)rows * width, sizeof *normed), *q = calloc((size_t)rows * width, sizeof *q);
    double *k = calloc((size_t)rows * kv, sizeof *k), *v = calloc((size_t)rows * kv, sizeof *v);
    double *attended = calloc((size_t)rows * width, sizeof *attended),
           *added = calloc((size_t)rows * width, sizeof *added);
    double *gate = calloc((size_t)rows * ffn, sizeof *gate), *up = calloc((size_t)rows * ffn, sizeof *up);

    reference_norm(x, reference_layer_tensor(reference, layer, "input_layernorm"), rows, width, s->norm_epsilon,
                   normed);
    reference_project(normed, reference_layer_tensor(reference, layer, "self_attn.q_proj"), rows, width, width, q);
    reference_project(normed, reference_layer_tensor(reference, layer, "self_attn.k_proj"), rows, width, kv, k);
    reference_project(normed, reference_layer_tensor(reference, layer, "self_attn.v_proj"), rows, width, kv, v);
    reference_rotate(q, s->heads, w, rows, s->rope_theta);
    reference_rotate(k, s->kv_heads, w, rows, s->rope_theta);
    reference_attention(q, k, v, rows, s->heads, s->kv_heads, w, attended);
    reference_project(attended, reference_layer_tensor(reference, layer, "self_attn.o_proj"), rows, width, width,
                      added);
    for (uint32_t i = 0; i < rows * width; i++) {
        x[i] += added[i];
    }
    reference_norm(x, reference_layer_tensor(reference, layer, "post_attention_layernorm"), rows, width,
                   s->norm_epsilon, normed);
    reference_project(normed, reference_layer_tensor(reference, layer, "mlp.gate_proj"), rows, width, ffn, gate);
    reference_project(normed, reference_layer_tensor(reference, layer, "mlp.up_proj"), rows, width, ffn, up);
    for (uint32_t i = 0; i < rows * ffn; i++) {
        gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    }
    reference_project(gate, reference_layer_tensor(reference, layer, "mlp.down_proj"), rows, ffn, width, added);
    for (uint32_t i = 0; i < rows * width; i++) {
        x[i] += added[i];
    }
    free(normed), free(q), free(k), free(v), free(attended), free(added), free(gate), free(up);
}

/* Logits of one sequence into out[rows][vocab]. */
static inline void reference_logits(const struct reference *reference, const uint32_t *tokens, double *out)
{
    const struct dl_model_spec *s = reference->spec;
    uint32_t rows = s->sequence_length, width = s->width;
    const double *embed = reference_tensor(reference, "model.embed_tokens.weight");
    const double *head = s->tied_embeddings ? embed : reference_tensor(reference, "lm_head.weight");
    double *x = calloc((size_t)rows * width, sizeof *x), *normed = calloc((size_t)rows * width, sizeof *normed);
    for (uint32_t r = 0; r < rows; r++) {
        memcpy(x + r * width, embed + tokens[r] * width, width * sizeof *x);
    }
    for (uint32_t layer = 0; layer < s->layers; layer++) {
        reference_layer(reference, layer, x);
    }
    reference_norm(x, reference_tensor(reference, "model.norm.weight"), rows, width, s->norm_epsilon, normed);
    reference_project(normed, head, rows, width, s->vocab_size, out);
    free(x), free(normed);
}

static inline double reference_loss(const struct reference *reference, const uint32_t *tokens, const uint32_t *targets,
                                    uint32_t sequences)
{
    const struct dl_model_spec *s = reference->spec;
    double total = 0;
    double *logits = calloc((size_t)s->sequence_length * s->vocab_size, sizeof *logits);
    for (uint32_t b = 0; b < sequences; b++) {
        reference_logits(reference, tokens + b * s->sequence_length, logits);
        for (uint32_t r = 0; r < s->sequence_length; r++) {
            const double *row = logits + (size_t)r * s->vocab_size;
            double sum = exp(row[0]);
            for (uint32_t i = 1; i < s->vocab_size; i++) {
                sum += exp(row[i]);
            }
            total += log(sum) - row[targets[b * s->sequence_length + r]];
        }
    }
    free(logits);
    return total / ((double)sequences * s->sequence_length);
}

#endif
