#pragma once

/* Made by cbindgen from inference-c/src/abi.rs: change that file, then run the test `header`. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The result of a call: 0, or the kind of the error. The numbers never change; later versions may
 * add some.
 */
typedef enum rust_mlx_status {
  /**
   * The call succeeded.
   */
  RUST_MLX_STATUS_OK = 0,
  /**
   * No backend has the requested name.
   */
  RUST_MLX_STATUS_UNKNOWN_BACKEND = 1,
  /**
   * The backend is linked but cannot work on this machine.
   */
  RUST_MLX_STATUS_UNAVAILABLE_BACKEND = 2,
  /**
   * No backend is linked, or none can work on this machine.
   */
  RUST_MLX_STATUS_NO_BACKEND = 3,
  /**
   * Two backends have the same name.
   */
  RUST_MLX_STATUS_DUPLICATE_BACKEND = 4,
  /**
   * There is no model at the path, and none of this name.
   */
  RUST_MLX_STATUS_MODEL_NOT_FOUND = 5,
  /**
   * The model's files are damaged, incomplete or contradict each other.
   */
  RUST_MLX_STATUS_INVALID_MODEL = 6,
  /**
   * The backend does not support the request.
   */
  RUST_MLX_STATUS_UNSUPPORTED = 7,
  /**
   * An argument or option has a value that cannot be used: a null pointer, a text that is not
   * UTF-8, JSON with a fault, an unknown name, a number out of range.
   */
  RUST_MLX_STATUS_INVALID_OPTION = 8,
  /**
   * The request was cancelled.
   */
  RUST_MLX_STATUS_CANCELLED = 9,
  /**
   * The request's deadline passed.
   */
  RUST_MLX_STATUS_DEADLINE_EXCEEDED = 10,
  /**
   * The request needs more memory than is available.
   */
  RUST_MLX_STATUS_OUT_OF_MEMORY = 11,
  /**
   * The model was closed.
   */
  RUST_MLX_STATUS_CLOSED = 12,
  /**
   * Reading or writing failed.
   */
  RUST_MLX_STATUS_IO = 13,
  /**
   * The engine behind the backend failed.
   */
  RUST_MLX_STATUS_ENGINE = 14,
  /**
   * A fault of this library: the code panicked. The model may be used further.
   */
  RUST_MLX_STATUS_PANIC = 15,
} rust_mlx_status;

/**
 * A loaded model. Several threads may call it at the same time. `rust_mlx_model_free` frees it.
 */
typedef struct rust_mlx_model rust_mlx_model;

/**
 * A function that receives each piece of a reply. `text` has `length` bytes of UTF-8, then a zero
 * byte; it is valid during the call only, and may be empty. `token` is the piece's token.
 * `user_data` is the pointer that the caller passed. The reply continues if the function returns
 * `true`, and ends if it returns `false`. The function must return: it must not throw an exception
 * or jump out.
 */
typedef bool (*rust_mlx_piece)(const char *text, size_t length, uint32_t token, void *user_data);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The version of this library, such as `0.1.0`. The text is static; do not free it.
 */
const char *rust_mlx_version(void);

/**
 * Lists the backends as a JSON array of objects with `name`, `available`, `default`, `reason` (why
 * the backend is unavailable, or `null`), `device` and `capabilities`.
 *
 * `out` receives the text; free it with `rust_mlx_string_free`. If `error` is not NULL, it
 * receives the message of an error, which is to be freed in the same way, or NULL. This holds for
 * `out` and `error` of all functions.
 *
 * # Safety
 * `out` and `error` must be NULL or point to a place that can be written.
 */
enum rust_mlx_status rust_mlx_backends(char **out, char **error);

/**
 * Loads a model. `model` is a directory, a .gguf file, a known name, or `owner/name` of the
 * Hugging Face Hub; a model that is not on this machine is downloaded. `backend` is a backend's
 * name; with NULL, the best available one is chosen. `options` is a JSON object of load options,
 * such as `{"context_len": 4096, "kv_bits": 8}`, or NULL.
 *
 * `out` receives the model; free it with `rust_mlx_model_free`.
 *
 * # Safety
 * Texts must end with a zero byte; `out` and `error` must be NULL or point to a place that can be
 * written.
 */
enum rust_mlx_status rust_mlx_load(const char *model,
                                   const char *backend,
                                   const char *options,
                                   struct rust_mlx_model **out,
                                   char **error);

/**
 * Frees a model. NULL is ignored.
 *
 * # Safety
 * `model` must be NULL or a model of `rust_mlx_load` that was not freed, and that no call uses.
 */
void rust_mlx_model_free(struct rust_mlx_model *model);

/**
 * Describes a model as a JSON object: architecture, sizes, types, device.
 *
 * # Safety
 * `model` must be NULL or a model that is not freed; `out` and `error` as for `rust_mlx_backends`.
 */
enum rust_mlx_status rust_mlx_model_info(const struct rust_mlx_model *model,
                                         char **out,
                                         char **error);

/**
 * Converts text to token ids. `add_special` adds the special tokens that the model expects around
 * a text. `out` receives the ids, and `count` their number; free them with `rust_mlx_tokens_free`.
 *
 * # Safety
 * As for `rust_mlx_model_info`; `text` must end with a zero byte, and `count` must be NULL or
 * point to a place that can be written.
 */
enum rust_mlx_status rust_mlx_tokenize(const struct rust_mlx_model *model,
                                       const char *text,
                                       bool add_special,
                                       uint32_t **out,
                                       size_t *count,
                                       char **error);

/**
 * Converts `count` token ids to text, without special tokens. A text with a zero byte is an error.
 *
 * # Safety
 * As for `rust_mlx_model_info`; `ids` must be an array of `count` ids.
 */
enum rust_mlx_status rust_mlx_detokenize(const struct rust_mlx_model *model,
                                         const uint32_t *ids,
                                         size_t count,
                                         char **out,
                                         char **error);

/**
 * Continues a text, without a chat template. `options` is a JSON object of generation options,
 * such as `{"max_tokens": 64, "temperature": 0.7, "stop": ["\n"]}`, or NULL. `on_piece` receives
 * each piece of the text, and may end the reply; with NULL, only the whole reply is returned.
 *
 * `out` receives the reply as a JSON object with `text`, `tokens`, `finish_reason` (`stop`,
 * `length`, or `cancelled` if `on_piece` ended it), `stop`, `logprobs` if requested, and `metrics`
 * with `prompt_tokens`, `generated_tokens` and times.
 *
 * # Safety
 * As for `rust_mlx_model_info`; texts must end with a zero byte, and `on_piece` must be NULL or a
 * function of this type, which may be called with `user_data`.
 */
enum rust_mlx_status rust_mlx_generate(const struct rust_mlx_model *model,
                                       const char *prompt,
                                       const char *options,
                                       rust_mlx_piece on_piece,
                                       void *user_data,
                                       char **out,
                                       char **error);

/**
 * Answers a conversation, with the model's chat template. `messages` is JSON: an array of
 * messages, such as `[{"role": "user", "content": "Hello"}]`, or an object with `messages` and
 * optionally `tools`, `chat_template_kwargs` and `continue_final_message`. A JSON string or an
 * array of token ids is a prompt without a template. The other arguments are those of
 * `rust_mlx_generate`.
 *
 * # Safety
 * As for `rust_mlx_generate`.
 */
enum rust_mlx_status rust_mlx_chat(const struct rust_mlx_model *model,
                                   const char *messages,
                                   const char *options,
                                   rust_mlx_piece on_piece,
                                   void *user_data,
                                   char **out,
                                   char **error);

/**
 * Embeds texts. `texts` is a JSON array of texts (or arrays of token ids). `options` is a JSON
 * object such as `{"dimensions": 256, "prompt_name": "query"}`, or NULL.
 *
 * `out` receives `rows` vectors of `dimensions` elements, one after another; free them with
 * `rust_mlx_floats_free` and their number, `rows * dimensions`.
 *
 * # Safety
 * As for `rust_mlx_model_info`; texts must end with a zero byte, and `rows` and `dimensions` must
 * be NULL or point to a place that can be written.
 */
enum rust_mlx_status rust_mlx_embed(const struct rust_mlx_model *model,
                                    const char *texts,
                                    const char *options,
                                    float **out,
                                    size_t *rows,
                                    size_t *dimensions,
                                    char **error);

/**
 * Frees a text that a function of this library returned. NULL is ignored.
 *
 * # Safety
 * `text` must be NULL or a text of this library that was not freed or changed.
 */
void rust_mlx_string_free(char *text);

/**
 * Frees the `count` ids that `rust_mlx_tokenize` returned. NULL is ignored.
 *
 * # Safety
 * `ids` must be NULL or ids of `rust_mlx_tokenize` that were not freed, and `count` their number.
 */
void rust_mlx_tokens_free(uint32_t *ids, size_t count);

/**
 * Frees the `count` numbers that `rust_mlx_embed` returned. NULL is ignored.
 *
 * # Safety
 * `values` must be NULL or numbers of `rust_mlx_embed` that were not freed, and `count` their
 * number: rows times dimensions.
 */
void rust_mlx_floats_free(float *values, size_t count);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus
