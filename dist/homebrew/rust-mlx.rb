# A formula for Homebrew, for macOS 14 or newer on Apple silicon:
#
#   brew install --HEAD ./dist/homebrew/rust-mlx.rb
#
# A release adds `url` and `sha256` of its source archive.
class RustMlx < Formula
  desc "Run language models on Apple's MLX"
  homepage "https://github.com/rust-mlx/rust-mlx"
  license any_of: ["MIT", "Apache-2.0"]
  head "https://github.com/rust-mlx/rust-mlx.git", branch: "main"

  depends_on "cmake" => :build
  depends_on "ninja" => :build
  depends_on "rust" => :build
  # pip provisions MLX when building, and fetches the known models.
  depends_on "python@3.13"
  depends_on arch: :arm64
  depends_on macos: :sonoma

  def install
    # The build keeps MLX here, pinned by its hash; the library is copied from there.
    ENV["MLX_SYS_CACHE_DIR"] = buildpath/"cache"
    ENV["MLX_SYS_PYTHON"] = formula_python
    system "cargo", "install", "--profile", "dist", "--bin", "mlx", *std_cargo_args(root: libexec)
    # The program looks in ../lib. The metallib has to lie beside the library.
    (libexec/"lib").install Dir[buildpath/"cache/mlx-metal-*/mlx/lib/{libmlx.dylib,mlx.metallib}"]
    (bin/"mlx").write_env_script libexec/"bin/mlx", MLX_PYTHON: formula_python
    generate_completions_from_executable(libexec/"bin/mlx", "completions")
    man1.mkpath
    system libexec/"bin/mlx", "man", man1
  end

  def formula_python
    Formula["python@3.13"].opt_bin/"python3.13"
  end

  test do
    assert_match "metal", shell_output("#{bin}/mlx backends")
    assert_match version.to_s, shell_output("#{bin}/mlx --version") unless head?
  end
end
