//! Words of messages. "Did you mean": the known name nearest to a mistyped one; the words of a reader of TOML as a person would say them;
//! counts.

/// The name among `known` that was probably meant: a third of its letters may be wrong, and one always. `images_per_class` holds
/// `per_class`, and that will do too.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Letters alone count: `ResNet-32` is `resnet32`.
    let plain = |text: &str| text.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).take(LONGEST).collect::<Vec<char>>();
    let meant = plain(name);
    let most = |other: &[char]| (meant.len().max(other.len()) / 3).max(1);
    let near = |other: &'a str| {
        let letters = plain(other);
        let far = distance(&meant, &letters);
        let holds = |long: &[char], short: &[char]| short.len() >= PART && long.windows(short.len()).any(|part| part == short);
        let part = holds(&meant, &letters) || holds(&letters, &meant);
        // Two names of one letter have nothing in common.
        ((far <= most(&letters) && far < letters.len().max(meant.len())) || part).then_some((far, other))
    };
    let found = known.into_iter().filter_map(near).min_by_key(|(far, _)| *far);
    found.map(|(_, other)| other)
}

/// ` (did you mean `batch`?)`, or nothing where no name is near.
pub fn did_you_mean<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest(name, known).map_or(String::new(), |meant| format!(" (did you mean `{meant}`?)"))
}

/// `1 epoch`, `2 epochs`.
pub fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A part of a name that says enough.
const PART: usize = 5;

/// A name longer than this was not typed.
const LONGEST: usize = 80;

/// How many letters are to be changed, left out, put in or swapped with their neighbour (optimal string alignment).
fn distance(a: &[char], b: &[char]) -> usize {
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    (0..=a.len()).for_each(|i| rows[i][0] = i);
    (0..=b.len()).for_each(|j| rows[0][j] = j);
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let changed = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            rows[i][j] = changed.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                rows[i][j] = rows[i][j].min(rows[i - 2][j - 2] + 1);
            }
        }
    }
    rows[a.len()][b.len()]
}

/// What a reader of TOML says of a key or a value, in everyday words: the types of Rust by what they accept, and the key that was meant.
pub fn in_words(complaint: &str) -> String {
    let mut said = complaint.trim().to_string();
    for (ours, words) in TYPES {
        let found = format!("expected {ours}");
        // Only where the word ends there: a key may begin as a type does.
        if let Some((before, after)) = said.split_once(&found).filter(|(_, after)| after.is_empty() || after.starts_with('\n')) {
            said = format!("{before}accepted: {words}{after}");
        }
    }
    for kind in ["unknown field `", "unknown variant `"] {
        let Some((before, rest)) = said.split_once(kind) else { continue };
        let Some((name, after)) = rest.split_once('`') else { continue };
        // "expected one of `a`, `b`" or "expected `a` or `b`": every second piece between backticks is a name.
        let known = after.split('`').skip(1).step_by(2);
        let hint = did_you_mean(name, known);
        said = format!("{before}{kind}{name}`{hint}{after}");
    }
    // The key comes on a line of its own, after what is wrong with it.
    match said.split_once("\nin `") {
        Some((what, key)) => format!("`{}: {}", key.trim_end(), what.replace('\n', " ")),
        None => said.replace('\n', " "),
    }
}

/// Types of Rust, and what a person writes for them.
const TYPES: &[(&str, &str)] = &[
    ("usize", "a whole number, 0 or more"),
    ("u64", "a whole number, 0 or more"),
    ("u32", "a whole number, 0 or more"),
    ("i64", "a whole number"),
    ("f64", "a number"),
    ("f32", "a number"),
    ("a boolean", "true or false"),
    ("a string", "a text in quotes"),
    ("a sequence", "a list in square brackets, for example [1, 2]"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_that_was_meant() {
        let recipes = ["cifar100-resnet32", "cifar100-resnet56", "imagenet-resnet18", "quickstart"];
        assert_eq!(nearest("quickstrat", recipes), Some("quickstart"));
        assert_eq!(nearest("cifar100_resnet-32", recipes), Some("cifar100-resnet32"));
        assert_eq!(nearest("swin", recipes), None);
        assert_eq!(nearest("ResNet-8", ["resnet8", "resnet18"]), Some("resnet8"));
        assert_eq!(nearest("images_per_class", ["per_class", "image_size"]), Some("per_class"));
        assert_eq!(nearest("x", ["y", "z"]), None);
        assert_eq!(nearest("", ["y"]), None);
        // Kukich 1992: four fifths of slips are one letter changed, left out, put in, or two swapped.
        for slip in ["btach", "batc", "battch", "badch"] {
            assert_eq!(nearest(slip, ["epochs", "batch", "lr"]), Some("batch"), "{slip}");
        }
    }

    #[test]
    fn distances_of_textbooks() {
        let between = |a: &str, b: &str| distance(&a.chars().collect::<Vec<_>>(), &b.chars().collect::<Vec<_>>());
        assert_eq!((between("kitten", "sitting"), between("flaw", "lawn"), between("ca", "abc"), between("", "abc")), (3, 2, 3, 3));
    }

    #[test]
    fn a_readers_words_as_a_person_says_them() {
        assert_eq!(
            in_words("unknown field `bacth`, expected one of `batch`, `epochs`"),
            "unknown field `bacth` (did you mean `batch`?), expected one of `batch`, `epochs`"
        );
        assert_eq!(
            in_words("unknown variant `cosin`, expected `cosine` or `constant`"),
            "unknown variant `cosin` (did you mean `cosine`?), expected `cosine` or `constant`"
        );
        assert_eq!(
            in_words("invalid type: string \"many\", expected usize"),
            "invalid type: string \"many\", accepted: a whole number, 0 or more"
        );
        assert_eq!(
            in_words("invalid type: string \"fast\", expected f64\nin `lr`\n"),
            "`lr`: invalid type: string \"fast\", accepted: a number"
        );
        assert_eq!(in_words("unknown field `zzz`, expected `usize`"), "unknown field `zzz`, expected `usize`");
    }
}
