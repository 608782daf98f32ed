//! Similar names for an unknown name, and the error that shows them.

use inference::{Error, ErrorKind};

use super::{HfHub, catalog, elsewhere};

/// Minimum similarity of a suggestion (Jaro-Winkler, from 0 to 1).
const ALIKE: f64 = 0.85;
/// Maximum number of suggestions in a message.
const MOST: usize = 3;

/// The names that are most similar to `typed`, best first. Candidates are the known models, the
/// models of the Hugging Face cache, and `more`. The function lists the cache, so it should be used
/// only for error messages.
#[must_use]
pub fn similar(typed: &str, more: &[String]) -> Vec<String> {
    let mut names: Vec<String> = catalog::catalog()
        .iter()
        .flat_map(|model| std::iter::once(&model.name).chain(model.aliases))
        .copied()
        .chain(elsewhere::names())
        .map(str::to_owned)
        .collect();
    if let Ok(cached) = HfHub::from_env().and_then(|hub| hub.list()) {
        names.extend(cached.into_iter().map(|model| model.id));
    }
    names.extend_from_slice(more);
    likest(typed, &names)
}

fn likest(typed: &str, names: &[String]) -> Vec<String> {
    let typed = typed.trim().to_lowercase();
    let likeness = |name: &String| {
        let name = name.to_lowercase();
        // The user may have omitted the owner.
        let bare = name.rsplit('/').next().unwrap_or(&name);
        strsim::jaro_winkler(&typed, &name).max(strsim::jaro_winkler(&typed, bare))
    };
    let mut candidates: Vec<(f64, &String)> = names
        .iter()
        .map(|name| (likeness(name), name))
        .filter(|(likeness, _)| *likeness >= ALIKE)
        .collect();
    candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(b.1)));
    candidates.dedup_by(|a, b| a.1 == b.1);
    candidates
        .into_iter()
        .take(MOST)
        .map(|(_, name)| name.clone())
        .collect()
}

/// Returns `; did you mean a, b or c?`, or an empty string if `names` is empty.
pub(super) fn question(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [name] => format!("; did you mean {name}?"),
        [some @ .., last] => format!("; did you mean {} or {last}?", some.join(", ")),
    }
}

/// The error for a model that cannot be found, with similar names.
pub(super) fn not_found(model: &str) -> Error {
    if let Some(repository) = elsewhere::on_the_hub(model) {
        return Error::new(
            ErrorKind::ModelNotFound,
            format!(
                "{model:?} has no pinned source here. `mlx pull {repository}` fetches it from the Hugging Face \
                 Hub; then both names work"
            ),
        );
    }
    let like = similar(model, &[]);
    Error::new(
        ErrorKind::ModelNotFound,
        format!(
            "no model {model:?}: not a directory, a file, a known name or owner/name; known names: {}{}",
            catalog::names(),
            question(&like)
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typos_and_missing_owners_are_seen_through() {
        let names = ["smollm2", "llama3.2", "own/tiny-llama", "gemma3"].map(String::from);
        assert_eq!(likest("smolm2", &names), ["smollm2"]);
        assert_eq!(likest("LLama3,2", &names), ["llama3.2"]);
        assert_eq!(likest("tiny-llama", &names), ["own/tiny-llama"]);
        assert!(likest("nothing-of-the-kind", &names).is_empty());
        assert!(likest("", &names).is_empty());
    }

    #[test]
    fn few_are_told_in_one_question() {
        let names: Vec<String> = (0..9).map(|n| format!("model-{n}")).collect();
        assert_eq!(likest("model-", &names).len(), MOST);
        assert_eq!(question(&names[..1]), "; did you mean model-0?");
        assert_eq!(question(&names[..2]), "; did you mean model-0 or model-1?");
        assert_eq!(question(&[]), "");
    }
}
