/* Included before every source file of mlx-c (compiler option -include).
 *
 * mlx-c hands the text of an exception to a printf-like function as the FORMAT. A file name or a
 * tensor name with a percent sign in it then reads, or writes, foreign memory. mlx-c's own header
 * is included first so that its guard keeps it from defining the macro again.
 */
#ifndef RUST_MLX_ERROR_FORMAT_H
#define RUST_MLX_ERROR_FORMAT_H

#include "mlx/c/error.h"

#undef mlx_error
#define mlx_error(text) _mlx_error(__FILE__, __LINE__, "%s", text)

#endif
