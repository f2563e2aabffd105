//! The recipes that ship, inside the program: they are found by name wherever it is started.

use std::path::Path;

use crate::error::{Error, Result, did_you_mean};
use crate::files;

/// A recipe of protocols/pretrain.
pub struct Shipped {
    /// The file's name without its ending.
    pub name: &'static str,
    /// The whole file.
    pub text: &'static str,
}

impl Shipped {
    /// What it is, from the first line of its header.
    pub fn about(&self) -> &'static str {
        self.text.lines().next().unwrap_or_default().trim_start_matches("# ")
    }
}

macro_rules! shipped {
    ($($name:literal,)*) => {
        &[$(Shipped { name: $name, text: include_str!(concat!("../../protocols/pretrain/", $name, ".toml")) },)*]
    };
}

/// Every recipe that ships, by name.
pub const RECIPES: &[Shipped] = shipped![
    "cifar10-resnet32",
    "cifar100-hcgnet_a1",
    "cifar100-hcgnet_a2",
    "cifar100-resnet110",
    "cifar100-resnet110-with-wrn_28_4",
    "cifar100-resnet32",
    "cifar100-resnet32-with-resnet110",
    "cifar100-resnet32-x3",
    "cifar100-resnet56",
    "cifar100-resnet56-with-resnet110",
    "cifar100-resnet56-with-wrn_40_2",
    "cifar100-resnet56-x3",
    "cifar100-shufflenet_v2_x0_5_cifar",
    "cifar100-shufflenet_v2_x0_5_cifar-x3",
    "cifar100-shufflenet_v2_x1_0_cifar",
    "cifar100-shufflenet_v2_x1_0_cifar-with-resnet110",
    "cifar100-shufflenet_v2_x1_0_cifar-with-wrn_40_2",
    "cifar100-shufflenet_v2_x1_0_cifar-x3",
    "cifar100-wrn_16_2",
    "cifar100-wrn_16_2-with-wrn_40_2",
    "cifar100-wrn_16_2-x3",
    "cifar100-wrn_40_2",
    "cifar100-wrn_40_2-with-wrn_28_4",
    "cifar100-wrn_40_2-x3",
    "imagenet-resnet18",
    "imagenet-resnet18-reference",
    "imagenet-resnet18-with-resnet50",
    "imagenet-resnet18-with-resnet50-reference",
    "imagenet-resnet34",
    "imagenet-resnet34-reference",
    "imagenet-resnet50",
    "imagenet-resnet50-reference",
    "imagenet-shufflenet_v2_x1_0",
    "imagenet-shufflenet_v2_x1_0-reference",
    "imagenet-shufflenet_v2_x1_0-with-resnet18",
    "imagenet-shufflenet_v2_x1_0-with-resnet18-reference",
    "imagenet-shufflenet_v2_x1_0-with-resnet50",
    "imagenet-shufflenet_v2_x1_0-with-resnet50-reference",
    "imagenet-swin_s",
    "imagenet-swin_t",
    "quickstart",
];

/// The recipe that ships under a name, with or without `.toml`.
pub fn find(name: &str) -> Option<&'static Shipped> {
    let name = name.strip_suffix(".toml").unwrap_or(name);
    RECIPES.iter().find(|shipped| shipped.name == name)
}

/// The text of a recipe: a file, or the name of one that ships. A file that is there wins.
pub fn open(path: &Path) -> Result<String> {
    if path.exists() {
        return files::read_text(path);
    }
    // A path that lost its folder still ends in the name.
    let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    path.to_str().and_then(find).map(|shipped| shipped.text.to_string()).ok_or_else(|| {
        Error::input(format!(
            "no recipe at {}, and none of this name ships{}; `mcl-train list recipes` shows those that do",
            path.display(),
            did_you_mean(name, RECIPES.iter().map(|shipped| shipped.name))
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_recipe_of_the_folder_ships() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("protocols/pretrain");
        let mut files: Vec<String> =
            std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned()).collect();
        files.sort();
        assert_eq!(RECIPES.iter().map(|r| r.name).collect::<Vec<_>>(), files, "add the new file to RECIPES");
        assert!(RECIPES.iter().all(|r| r.text.starts_with("# ")));
    }

    #[test]
    fn a_name_is_enough_and_a_file_wins() {
        assert!(open(Path::new("quickstart")).unwrap().contains("resnet8"));
        assert!(open(Path::new("quickstart.toml")).is_ok());
        let refused = open(Path::new("protocols/quickstrat.toml")).unwrap_err().to_string();
        assert!(refused.contains("no recipe at protocols/quickstrat.toml") && refused.contains("did you mean `quickstart`?"), "{refused}");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("quickstart");
        std::fs::write(&file, "mine").unwrap();
        assert_eq!(open(&file).unwrap(), "mine");
    }
}
