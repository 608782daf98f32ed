/* Answers a question, piece by piece.
 *
 *     cc -std=c99 -I inference-c/include examples/c/generate.c -L target/release -lrust_mlx_c \
 *         -Wl,-rpath,target/release -o generate
 *     ./generate MODEL QUESTION [BACKEND]
 *
 * MODEL is a directory, a .gguf file or a name such as smollm2. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rust_mlx.h"

/* Prints a piece of the reply. `false` would end the reply here. */
static bool print_piece(const char *text, size_t length, uint32_t token, void *user_data) {
    (void)token;
    return fwrite(text, 1, length, (FILE *)user_data) == length && fflush((FILE *)user_data) == 0;
}

/* A conversation of one message as JSON, in which quotes and control characters are escaped. */
static char *conversation(const char *question) {
    static const char before[] = "[{\"role\": \"user\", \"content\": \"";
    static const char after[] = "\"}]";
    char *json = malloc(sizeof before + 6 * strlen(question) + sizeof after);
    if (!json) {
        return NULL;
    }
    char *end = json + sprintf(json, "%s", before);
    for (const unsigned char *c = (const unsigned char *)question; *c; c++) {
        if (*c == '"' || *c == '\\' || *c < 0x20) {
            end += sprintf(end, "\\u%04x", (unsigned)*c);
        } else {
            *end++ = (char)*c;
        }
    }
    strcpy(end, after);
    return json;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL QUESTION [BACKEND]\n", argv[0]);
        return 2;
    }
    rust_mlx_model *model = NULL;
    char *error = NULL;
    const char *backend = argc > 3 ? argv[3] : NULL;
    rust_mlx_status status = rust_mlx_load(argv[1], backend, NULL, &model, &error);
    char *messages = conversation(argv[2]);
    char *reply = NULL;
    if (status == RUST_MLX_STATUS_OK && messages) {
        const char *options = "{\"max_tokens\": 64}";
        status = rust_mlx_chat(model, messages, options, print_piece, stdout, &reply, &error);
    }
    if (status == RUST_MLX_STATUS_OK && reply) {
        /* Text, tokens, the reason of the end, and metrics, as JSON. */
        fprintf(stderr, "\n%s\n", reply);
    } else {
        fprintf(stderr, "error %d: %s\n", (int)status, error ? error : "no memory");
    }
    rust_mlx_string_free(reply);
    rust_mlx_string_free(error);
    rust_mlx_model_free(model);
    free(messages);
    return status == RUST_MLX_STATUS_OK ? 0 : 1;
}
