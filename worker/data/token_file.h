/* wk_token_file: one file of training data as an array of tokens.
 *
 * Text (a byte is a token), or token numbers of 16 or 32 bits, little-endian, with or without llm.c's header; each of
 * them also compressed with gzip or dictzip. Files that are not compressed are mapped into memory: they may be larger
 * than it, and must not shrink while a worker reads them. Compressed ones are unpacked once: by one process for all of a run
 * into its cache (cache.h), from where they are mapped; without a cache into memory.
 *
 * Read-only once open; any thread. Layer: worker/data, above common. */
#ifndef WK_DATA_TOKEN_FILE_H
#define WK_DATA_TOKEN_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"

/* llm.c's header: 256 int32, of which [0] magic, [1] version, [2] number of tokens. */
#define WK_LLMC_HEADER_BYTES 1024
#define WK_LLMC_MAGIC_U16 20240520
#define WK_LLMC_VERSION_U16 1
#define WK_LLMC_MAGIC_U32 20240801
#define WK_LLMC_VERSION_U32 7

struct wk_token_file {
    char path[DL_SPEC_TEXT_MAX];
    uint8_t *bytes; /* Mapped or unpacked content, with a header if it has one. */
    size_t size;
    bool is_unpacked;     /* `bytes` is the heap's; else a mapping. */
    uint32_t token_bytes; /* 1, 2 or 4 */
    size_t first_token;   /* Byte at which tokens start. */
    uint64_t tokens;
};

/* Opens a file as `format` says; auto: gzip by its magic, then llm.c's header by its magic, else text. Errors name the
 * file: DL_ENOTFOUND, DL_EDENIED, DL_EIO; DL_EINVAL for what is not of the format (empty, odd size, a header that
 * promises more than is there, a .bin file without a header under auto); DL_ECORRUPT for a damaged or cut gzip file;
 * DL_ENOMEM when it unpacks to more than `unpacked_bytes_max`. */
DL_MUST_CHECK enum dl_rc wk_token_file_open(const char *path, enum dl_data_format format, uint64_t unpacked_bytes_max,
                                            struct wk_token_file *file, struct dl_err *err);
void wk_token_file_close(struct wk_token_file *file);

/* Tokens `first` .. first+count-1, which must be in the file, into `out`. DL_EINVAL: one is not below `vocab_size`; the
 * text names it, the file and its byte offset. */
DL_MUST_CHECK enum dl_rc wk_token_file_read(const struct wk_token_file *file, uint64_t first, uint64_t count,
                                            uint32_t vocab_size, uint32_t *out, struct dl_err *err);

/* Looks at every token of the file, as wk_token_file_read does, without copying any. */
DL_MUST_CHECK enum dl_rc wk_token_file_check(const struct wk_token_file *file, uint32_t vocab_size, struct dl_err *err);

#endif
