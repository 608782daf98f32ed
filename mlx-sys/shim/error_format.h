/* Included before every source file of mlx-c (compiler option -include).
 *
 * 1. mlx-c passes the text of an exception to a printf-like function as the FORMAT. If a file name
 * or a tensor name in the text contains a percent sign, that function reads or writes memory that
 * is not its own. mlx-c's own header is included first, so that its guard keeps it from defining
 * the macro again.
 *
 * 2. mlx-c 0.7 composes messages with std::format, which the standard library of GCC 12 lacks. For
 * that library, this file defines a std::format that supports only the placeholder {}.
 */
#ifndef RUST_MLX_ERROR_FORMAT_H
#define RUST_MLX_ERROR_FORMAT_H

#include "mlx/c/error.h"

#undef mlx_error
#define mlx_error(text) _mlx_error(__FILE__, __LINE__, "%s", text)

#ifdef __cplusplus
#include <version>
#ifndef __cpp_lib_format
#include <sstream>
#include <string>
#include <string_view>

namespace std {
template <typename... Values>
string format(string_view text, const Values&... values) {
  ostringstream out;
  auto next = [&](const auto& value) {
    auto at = text.find("{}");
    out << text.substr(0, at) << value;
    text = at == string_view::npos ? string_view() : text.substr(at + 2);
  };
  (next(values), ...);
  out << text;
  return out.str();
}
} // namespace std
#endif
#endif

#endif
