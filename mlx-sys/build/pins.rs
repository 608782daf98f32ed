//! Reads `vendor/pins.json`, the list of provisioned packages with version and SHA-256.

use std::path::Path;

use serde_json::Value;

/// A version of mlx-c: major, minor, patch.
pub type Version = (u64, u64, u64);

/// The file's contents.
pub struct Pins(Value);

/// One pinned wheel.
#[derive(Debug, Clone, PartialEq)]
pub struct Wheel {
    pub package: String,
    pub version: String,
    pub platform: String,
    pub sha256: String,
}

/// Parses `1.2.3` to numbers.
pub fn parse_version(text: &str) -> Option<Version> {
    let mut parts = text.trim().split('.').map(|p| p.parse().ok());
    let version = (parts.next()??, parts.next()??, parts.next()??);
    parts.next().is_none().then_some(version)
}

/// The versions of mlx-c that this binding supports, as text for messages.
pub const SUPPORTED: &str = "0.4.1 to 0.5.x and 0.7.x";

/// Whether this binding supports the API of this mlx-c.
pub fn supported(version: Version) -> bool {
    ((0, 4, 1)..(0, 6, 0)).contains(&version) || ((0, 7, 0)..(0, 8, 0)).contains(&version)
}

/// The API levels above 0.4.1 that a version of mlx-c has. Each becomes a cfg such as `mlx_c_0_5`
/// in `mlx-sys` and in dependents.
pub fn levels((major, minor, _): Version) -> impl Iterator<Item = &'static str> {
    let all = [((0, 5), "0_5"), ((0, 7), "0_7")];
    all.into_iter()
        .filter(move |(first, _)| (major, minor) >= *first)
        .map(|(_, name)| name)
}

impl Pins {
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        Self::parse(&text).map_err(|e| format!("{}: {e}", path.display()))
    }

    pub fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text)
            .map(Self)
            .map_err(|e| e.to_string())
    }

    fn text(value: &Value, key: &str) -> Result<String, String> {
        let text = value.get(key).and_then(Value::as_str);
        text.map(str::to_owned)
            .ok_or_else(|| format!("pins.json lacks `{key}`"))
    }

    /// The default minor version of mlx-c.
    pub fn default_mlx_c(&self) -> Result<String, String> {
        Self::text(&self.0, "mlx_c_default")
    }

    /// The minor versions of mlx-c that have a pinned package.
    pub fn all_mlx_c(&self) -> Vec<&str> {
        let all = self.0["mlx_c"].as_object();
        all.into_iter()
            .flatten()
            .map(|(name, _)| name.as_str())
            .collect()
    }

    /// A field of the pinned package of a minor version of mlx-c.
    pub fn mlx_c(&self, minor: &str, key: &str) -> Result<String, String> {
        Self::text(&self.0["mlx_c"][minor], key)
    }

    /// The MLX version that matches a version of mlx-c.
    pub fn mlx_for(&self, (major, minor, _): Version) -> Result<String, String> {
        Self::text(&self.0["mlx_for_mlx_c"], &format!("{major}.{minor}"))
    }

    /// The NVIDIA packages for a version of MLX and of CUDA, each with the directory below `nvidia`
    /// where MLX searches for it.
    pub fn cuda_libraries(&self, mlx: &str, cuda: &str) -> Result<Vec<(String, String)>, String> {
        let minor = mlx.rsplit_once('.').map_or(mlx, |(minor, _)| minor);
        let all = self.0["cuda_libraries"][minor][cuda].as_object();
        let all = all.ok_or_else(|| {
            format!("pins.json has no NVIDIA packages for MLX {minor} and CUDA {cuda}")
        })?;
        all.iter()
            .map(|(directory, package)| {
                let package = package
                    .as_str()
                    .ok_or_else(|| format!("pins.json: `{directory}` names no package"))?;
                Ok((directory.clone(), package.to_owned()))
            })
            .collect()
    }

    /// The wheel of a package for a target. If there are several, `version` selects one.
    pub fn wheel(
        &self,
        package: &str,
        version: Option<&str>,
        target: &str,
    ) -> Result<Wheel, String> {
        let empty = Vec::new();
        let wheels = self.0["wheels"].as_array().unwrap_or(&empty);
        for wheel in wheels {
            let parsed = Wheel {
                package: Self::text(wheel, "package")?,
                version: Self::text(wheel, "version")?,
                platform: Self::text(wheel, "platform")?,
                sha256: Self::text(wheel, "sha256")?,
            };
            if parsed.package == package
                && version.is_none_or(|v| v == parsed.version)
                && Self::text(wheel, "target")? == target
            {
                return Ok(parsed);
            }
        }
        Err(format!(
            "no pinned Python package `{package}` for the target {target}"
        ))
    }
}
