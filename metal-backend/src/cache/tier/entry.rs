//! One file of the disk tier: a prompt cache of `cache/file.rs` with two more values in its header.
//! One describes the entry, the other is a hash of the complete file.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write as _};
use std::path::Path;

use inference_formats::hex;
use inference_formats::safetensors::SafetensorsCheckpoint;
use inference_formats::{Error as FormatsError, ErrorKind as FormatsKind};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// The metadata key of [`About`], as JSON.
const ABOUT: &str = "0.rust_mlx_tier";
/// The metadata key of the file's hash. While the hash is computed, zeros stand in its place.
const HASH: &str = "0.rust_mlx_sha256";
/// The number of hexadecimal digits of a hash.
const DIGITS: usize = 64;
/// The version of the entry format.
const VERSION: u32 = 1;
/// File names are this prefix, a hash, and [`SUFFIX`].
const PREFIX: &str = "prefix-";
const SUFFIX: &str = ".safetensors";
/// The maximum size of a header that is read, in bytes.
const MAX_HEADER: u64 = 64 << 20;

/// Describes the contents of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// The version of the entry format.
    pub version: u32,
    /// The identity of the model's files.
    pub model: String,
    /// The identity of the adapter's files, if there is one.
    pub adapter: Option<String>,
    /// A description of all other settings that change the computed values.
    pub variant: String,
    /// The hash of the salt.
    pub salt: Option<String>,
    /// The hash of the kinds of the layers' states.
    pub kinds: String,
    /// The value of `Caches::stretch`.
    pub stretch: usize,
    /// Whether the caches can be truncated to any prefix of the tokens.
    pub cuts: bool,
    /// The computed tokens.
    pub tokens: Vec<u32>,
}

impl Default for About {
    fn default() -> Self {
        Self {
            version: VERSION,
            model: String::new(),
            adapter: None,
            variant: String::new(),
            salt: None,
            kinds: String::new(),
            stretch: 0,
            cuts: false,
            tokens: Vec::new(),
        }
    }
}

impl About {
    /// Returns the name of the entry's file. Entries of equal content have equal names.
    pub fn name(&self) -> String {
        let mut digest = Sha256::new();
        let texts = [
            Some(&self.model),
            self.adapter.as_ref(),
            Some(&self.variant),
            self.salt.as_ref(),
            Some(&self.kinds),
        ];
        for text in texts {
            // The length separates the texts. A missing text has a length that no text can have.
            let length = text.map_or(u64::MAX, |text| text.len() as u64);
            digest.update(length.to_le_bytes());
            digest.update(text.map_or("", String::as_str));
        }
        for token in &self.tokens {
            digest.update(token.to_le_bytes());
        }
        format!("{PREFIX}{}{SUFFIX}", hex(&digest.finalize()))
    }

    /// Returns the identity that `cache/file.rs` stores in the file.
    pub fn identity(&self) -> String {
        match &self.adapter {
            Some(adapter) => format!("{}+{adapter}", self.model),
            None => self.model.clone(),
        }
    }

    /// Whether both entries come from the same computation, apart from the tokens.
    pub fn is_akin(&self, other: &Self) -> bool {
        self.model == other.model
            && self.adapter == other.adapter
            && self.variant == other.variant
            && self.salt == other.salt
            && self.kinds == other.kinds
            && self.stretch == other.stretch
    }

    /// Returns the values for the header of the file.
    pub fn texts(&self) -> serde_json::Result<[(String, String); 2]> {
        let about = serde_json::to_string(self)?;
        Ok([
            (ABOUT.to_owned(), about),
            (HASH.to_owned(), "0".repeat(DIGITS)),
        ])
    }
}

/// Whether a file name has the form of [`About::name`].
pub fn is_entry(name: &str) -> bool {
    let digits = (name.strip_prefix(PREFIX)).and_then(|name| name.strip_suffix(SUFFIX));
    digits.is_some_and(|digits| {
        digits.len() == DIGITS && digits.bytes().all(|b| b.is_ascii_hexdigit())
    })
}

/// Returns the SHA-256 hash of texts, each with its length.
pub fn hash<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut digest = Sha256::new();
    for text in texts {
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text);
    }
    hex(&digest.finalize())
}

/// The reason why a file is not a usable entry.
#[derive(Debug)]
pub enum Fault {
    /// Another process has removed the file.
    Gone,
    /// The file has changed since it was written.
    Damaged(String),
    /// The file is intact, but another program or version wrote it.
    Foreign(String),
}

impl From<io::Error> for Fault {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::NotFound => Self::Gone,
            io::ErrorKind::UnexpectedEof => Self::Damaged("it is truncated".to_owned()),
            _ => Self::Foreign(e.to_string()),
        }
    }
}

impl From<FormatsError> for Fault {
    fn from(e: FormatsError) -> Self {
        match e.kind() {
            FormatsKind::NotFound => Self::Gone,
            FormatsKind::Invalid => Self::Damaged(e.message().to_owned()),
            _ => Self::Foreign(e.message().to_owned()),
        }
    }
}

/// Reads the header of the file `name` at `path`.
pub fn read(path: &Path, name: &str) -> Result<About, Fault> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let texts = SafetensorsCheckpoint::metadata(path)?;
    let about = texts
        .get(ABOUT)
        // The name says that the file was an entry, so it must have been damaged.
        .ok_or_else(|| Fault::Damaged("its description is missing".to_owned()))?;
    let damaged = |_| Fault::Damaged("its description is damaged".to_owned());
    let version = serde_json::from_str::<Version>(about).map_err(damaged)?;
    if version.version > VERSION {
        return Err(Fault::Foreign(format!(
            "it has version {}; this program reads version {VERSION}",
            version.version
        )));
    }
    let about: About = serde_json::from_str(about).map_err(damaged)?;
    if about.name() != name {
        return Err(Fault::Damaged("its description is damaged".to_owned()));
    }
    // Opening checks the length of the file against the sizes in its header.
    SafetensorsCheckpoint::open_file(path)?;
    Ok(about)
}

/// Returns the recorded hash, the computed hash, and the offset of the recorded hash in the file.
fn hashes(file: &mut File) -> Result<(String, String, u64), Fault> {
    let damaged = |what: &str| Fault::Damaged(what.to_owned());
    let mut start = [0; 8];
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(&mut start)?;
    let length = u64::from_le_bytes(start);
    if length > MAX_HEADER.min(file.metadata()?.len()) {
        return Err(damaged("its header is damaged"));
    }
    let mut header = vec![0; usize::try_from(length).unwrap_or_default()];
    file.read_exact(&mut header)?;
    // Quotes inside texts are escaped by a backslash, so this pattern matches only the key.
    let key = format!("\"{HASH}\":\"");
    let at = (header
        .windows(key.len())
        .position(|part| part == key.as_bytes()))
    .map(|at| at + key.len())
    .ok_or_else(|| damaged("its header has no hash"))?;
    let place = (header.get_mut(at..at + DIGITS)).ok_or_else(|| damaged("its hash is damaged"))?;
    let recorded = String::from_utf8_lossy(place).into_owned();
    place.fill(b'0');
    let mut digest = Sha256::new();
    digest.update(start);
    digest.update(&header);
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => digest.update(&buffer[..n]),
        }
    }
    let at = (start.len() + at) as u64;
    Ok((recorded, hex(&digest.finalize()), at))
}

/// Writes the hash into an unfinished file.
pub fn seal(path: &Path) -> io::Result<()> {
    let mut file = File::options().read(true).write(true).open(path)?;
    let (_, computed, at) = hashes(&mut file).map_err(|fault| match fault {
        Fault::Damaged(why) | Fault::Foreign(why) => io::Error::other(why),
        Fault::Gone => io::ErrorKind::NotFound.into(),
    })?;
    file.seek(SeekFrom::Start(at))?;
    file.write_all(computed.as_bytes())?;
    file.sync_all()
}

/// Compares a file with its hash.
pub fn verify(path: &Path) -> Result<(), Fault> {
    let (recorded, computed, _) = hashes(&mut File::open(path)?)?;
    match recorded == computed {
        true => Ok(()),
        false => Err(Fault::Damaged(
            "its content differs from its hash".to_owned(),
        )),
    }
}
