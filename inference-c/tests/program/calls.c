/* Calls every function and prints the results, a line each, for `program.rs` to check.
 *
 *     calls MODEL ENCODER TEXT PROMPT TEXTS
 *
 * PROMPT is a list of token ids, and TEXTS a list of texts, both as JSON. */
#include <stdio.h>
#include <string.h>

#include "rust_mlx.h"

static char *error = NULL;

/* Prints the status and the message of a call that must fail, and frees the message. */
static void refused(const char *name, rust_mlx_status status) {
    printf("refused %s %d %s\n", name, (int)status, error ? error : "(none)");
    rust_mlx_string_free(error);
    error = NULL;
}

static bool worked(const char *name, rust_mlx_status status) {
    if (status != RUST_MLX_STATUS_OK) {
        fprintf(stderr, "%s: %d %s\n", name, (int)status, error ? error : "(none)");
        return false;
    }
    return error == NULL;
}

struct pieces {
    int seen;
    int most;
    char text[4096];
};

static bool take(const char *text, size_t length, uint32_t token, void *user_data) {
    struct pieces *pieces = user_data;
    (void)token;
    if (text[length] == '\0' && strlen(pieces->text) + length < sizeof pieces->text) {
        strcat(pieces->text, text);
    }
    pieces->seen += 1;
    return pieces->seen < pieces->most;
}

static int misuse(rust_mlx_model *model) {
    char *text = NULL;
    rust_mlx_model *other = NULL;
    uint32_t *ids = NULL;
    size_t count = 7;
    const char bad[] = {'a', (char)0xff, '\0'};
    refused("null-model", rust_mlx_model_info(NULL, &text, &error));
    refused("null-out", rust_mlx_model_info(model, NULL, &error));
    refused("null-name", rust_mlx_load(NULL, NULL, NULL, &other, &error));
    refused("bad-utf8", rust_mlx_load(bad, NULL, NULL, &other, &error));
    refused("no-backend", rust_mlx_load("x", "abacus", NULL, &other, &error));
    refused("no-model", rust_mlx_load("no-such-model", "cpu", NULL, &other, &error));
    refused("bad-json", rust_mlx_load("x", "cpu", "{", &other, &error));
    refused("bad-option", rust_mlx_load("x", "cpu", "{\"kv_bits\": 7}", &other, &error));
    refused("twice", rust_mlx_load("x", "cpu", "{\"backend\": \"cpu\"}", &other, &error));
    refused("null-prompt", rust_mlx_generate(model, NULL, NULL, NULL, NULL, &text, &error));
    refused("no-option",
            rust_mlx_generate(model, "a", "{\"temprature\": 1}", NULL, NULL, &text, &error));
    refused("logits",
            rust_mlx_generate(model, "a", "{\"logits\": true}", NULL, NULL, &text, &error));
    refused("bad-messages", rust_mlx_chat(model, "[{\"role\": 3}]", NULL, NULL, NULL, &text, &error));
    refused("null-ids", rust_mlx_detokenize(model, NULL, 3, &text, &error));
    refused("null-count", rust_mlx_tokenize(model, "a", true, &ids, NULL, &error));
    const uint32_t unknown[] = {4000000000u};
    refused("unknown-id", rust_mlx_detokenize(model, unknown, 1, &text, &error));
    refused("null-text", rust_mlx_tokenize(model, NULL, true, &ids, &count, &error));
    /* Without a place for the message, the status is all. */
    if (rust_mlx_model_info(NULL, &text, NULL) != RUST_MLX_STATUS_INVALID_OPTION) {
        return 1;
    }
    /* Results of failed calls are NULL and 0. */
    if (text || other || ids || count != 0) {
        return 1;
    }
    rust_mlx_string_free(NULL);
    rust_mlx_tokens_free(NULL, 3);
    rust_mlx_floats_free(NULL, 3);
    rust_mlx_model_free(NULL);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 6) {
        return 2;
    }
    char *text = NULL;
    printf("version %s\n", rust_mlx_version());
    if (!worked("backends", rust_mlx_backends(&text, &error))) {
        return 3;
    }
    printf("backends %s\n", text);
    rust_mlx_string_free(text);

    rust_mlx_model *model = NULL;
    const char *exact = "{\"precision\": \"exact\"}";
    if (!worked("load", rust_mlx_load(argv[1], "cpu", exact, &model, &error)) ||
        !worked("info", rust_mlx_model_info(model, &text, &error))) {
        return 4;
    }
    printf("info %s\n", text);
    rust_mlx_string_free(text);

    uint32_t *ids = NULL;
    size_t count = 0;
    if (!worked("tokenize", rust_mlx_tokenize(model, argv[3], true, &ids, &count, &error))) {
        return 5;
    }
    printf("ids [");
    for (size_t i = 0; i < count; i++) {
        printf("%s%u", i ? ", " : "", (unsigned)ids[i]);
    }
    printf("]\n");
    if (!worked("detokenize", rust_mlx_detokenize(model, ids, count, &text, &error))) {
        return 6;
    }
    printf("text %s\n", text);
    rust_mlx_string_free(text);
    rust_mlx_tokens_free(ids, count);

    const char *greedy = "{\"max_tokens\": 24, \"ignore_eos\": true}";
    struct pieces pieces = {0, 1000, ""};
    if (!worked("chat", rust_mlx_chat(model, argv[4], greedy, take, &pieces, &text, &error))) {
        return 7;
    }
    printf("reply %s\n", text);
    printf("pieces %d\n", pieces.seen);
    rust_mlx_string_free(text);

    struct pieces few = {0, 3, ""};
    if (!worked("stop", rust_mlx_generate(model, argv[3], greedy, take, &few, &text, &error))) {
        return 8;
    }
    printf("stopped %s\n", text);
    rust_mlx_string_free(text);
    if (!worked("whole", rust_mlx_generate(model, argv[3], greedy, NULL, NULL, &text, &error))) {
        return 9;
    }
    printf("whole %s\n", text);
    rust_mlx_string_free(text);

    if (misuse(model)) {
        return 10;
    }
    float *values = NULL;
    size_t rows = 0;
    size_t dimensions = 0;
    refused("no-embedding-option",
            rust_mlx_embed(model, argv[5], "{\"dimension\": 3}", &values, &rows, &dimensions, &error));
    rust_mlx_model_free(model);

    rust_mlx_model *encoder = NULL;
    if (!worked("encoder", rust_mlx_load(argv[2], "cpu", exact, &encoder, &error)) ||
        !worked("embed", rust_mlx_embed(encoder, argv[5], "{\"truncate\": true}", &values, &rows,
                                        &dimensions, &error))) {
        return 11;
    }
    printf("vectors %zu %zu [", rows, dimensions);
    for (size_t i = 0; i < rows * dimensions; i++) {
        printf("%s%.9g", i ? ", " : "", (double)values[i]);
    }
    printf("]\n");
    rust_mlx_floats_free(values, rows * dimensions);
    refused("encoder-generates",
            rust_mlx_generate(encoder, "a", NULL, NULL, NULL, &text, &error));
    rust_mlx_model_free(encoder);
    return 0;
}
