//! Who reads the inputs: the library in this process, and the programs.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use mcl::data::{self, Archive, Loader, Options, Split, Transform};
use mcl::error::{Error, Result};
use mcl::eval::network::{NetworkArgs, PeerChoice, WeightsArgs};
use mcl::eval::{Common, measures, record};
use mcl::experiment::Plan;
use mcl::extractor::Extractor;
use mcl::methods::{self, Task};
use mcl::nets;
use mcl::recipe::Recipe;
use mcl::report::Map;
use mcl::run::Run;
use mcl::system::ranks::Ranks;
use mcl::train::{self, Job};
use mcl::weights::{self, Classifier, LoadOptions};
use md5::{Digest, Md5};
use tch::{Device, Kind as Type, Tensor};

pub const TRAIN: &str = env!("CARGO_BIN_EXE_mcl-train");
pub const EVAL: &str = env!("CARGO_BIN_EXE_mcl-eval");

pub fn read_recipe(root: &Path, _: &str) -> Result<()> {
    let recipe = Recipe::read(&root.join("recipe.toml"), &[], &methods::names())?;
    let archs = recipe.cohort.archs.iter().map(|name| nets::find(name)).collect::<Result<Vec<_>>>()?;
    let labels: Vec<i64> = (0..64).map(|i| i % 8).collect();
    let task = Task::new(&recipe, &archs, 8, &labels, Device::Cpu);
    (methods::find(recipe.method_name())?.build)(&task, recipe.method_options()).map(drop)
}

fn measure_of(file: &str) -> &str {
    let stem = file.rsplit('/').next().unwrap().trim_end_matches(".toml");
    if stem.starts_with("linear-") { "linear-probe" } else { stem }
}

pub fn read_protocol(root: &Path, file: &str) -> Result<()> {
    measures::check_line(&format!("{} --dataset cifar10 --protocol {}", measure_of(file), root.join(file).display())).map(drop)
}

fn job<'a>(root: &Path, stop: &'a AtomicBool) -> Result<Job<'a>> {
    Ok(Job {
        recipe: Recipe::read(&root.join("recipe.toml"), &[], &methods::names())?,
        out: root.join("run"),
        data: None,
        device: Device::Cpu,
        threads: 1,
        resume: true,
        from: None,
        init: None,
        quiet: true,
        commit: "hostile",
        ranks: Ranks::ALONE,
        stop,
    })
}

pub fn resume(root: &Path, _: &str) -> Result<()> {
    tch::set_num_threads(1);
    train::run(job(root, &AtomicBool::new(false))?).map(drop)
}

pub fn read_weights(root: &Path, file: &str) -> Result<()> {
    let arch = nets::find("resnet8")?;
    let options = LoadOptions { classifier: Classifier::Optional, allow_partial: false, strip: None };
    let given = (file != "weights.safetensors").then_some(arch);
    let opened = weights::open(&root.join(file), given, Device::Cpu, &options)?;
    let images = Tensor::zeros([2, 3, 16, 16], (Type::Float, Device::Cpu));
    Extractor::new(opened.arch, &opened.params, None, opened.classes.unwrap_or(1), 1).extract(&images, true).map(drop)
}

pub fn read_images(root: &Path, file: &str) -> Result<()> {
    let mut reader = weights::safetensors::Reader::open(&root.join(file))?;
    for name in reader.names() {
        let _ = reader.tensor(&name)?;
    }
    Ok(())
}

pub fn read_sets(root: &Path, below: &str, names: &[&str]) -> Result<()> {
    for name in names {
        let set = data::open(name, Some(&root.join(below)), &Options::default())?;
        let transform = if set.one_size { set.test_transform() } else { Transform::centre(32, set.mean, set.std) };
        let look = |split: &Split| -> Result<()> {
            let few: Vec<usize> = (0..split.len().min(6)).collect();
            Loader::eval(&split.subset(&few), 4, transform.clone()).try_for_each(|batch| batch.map(drop))
        };
        look(&set.train)?;
        look(&set.test)?;
        set.train.subset(&[0]).resized(16)?;
    }
    Ok(())
}

/// Serves one file on loopback to whoever asks, as often as asked.
fn serve(content: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = BufReader::new(stream.try_clone().unwrap()).lines().map_while(|l| l.ok()).take_while(|l| !l.is_empty()).count();
            let _ =
                stream.write_all(format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", content.len()).as_bytes());
            let _ = stream.write_all(&content);
        }
    });
    address
}

pub fn fetch(root: &Path, name: &str) -> Result<()> {
    let content = fs::read(root.join(name)).map_err(Error::open(root.join(name)))?;
    let md5: String = Md5::digest(&content).iter().map(|b| format!("{b:02x}")).collect();
    let file = if name == "set.zip" { "set.zip" } else { "set.tar.gz" };
    // Like an official archive: its checksum is right.
    let archive = Archive { folder: "set-1", file, base: "", md5: md5.leak(), megabytes: 1 };
    data::fetch::bring(&archive, &root.join("data"), &serve(content), true).map(drop)
}

pub fn read_results(root: &Path, _: &str) -> Result<()> {
    record::read(&root.join("run")).map(drop)
}

pub fn read_metrics(root: &Path, _: &str) -> Result<()> {
    let run = Run::read(&root.join("run"))?;
    run.folder.read_summary()?;
    let _ = (0..3).map(|m| run.accuracy(m)).collect::<Vec<_>>();
    Ok(())
}

pub fn nothing(_: &Path, _: &str) -> Result<()> {
    Ok(())
}

pub fn read_plan(root: &Path, _: &str) -> Result<()> {
    Plan::read(&root.join("plan.toml"))?.items(&root.join("out")).map(drop)
}

fn common() -> Common {
    Common { data: None, device: Device::Cpu, threads: 1, json: false, quiet: true, commit: "hostile", id: None }
}

/// Its code is run: what is asked is that libtorch's exceptions become one line, and that a file that is damaged is refused before.
pub fn read_script(root: &Path, _: &str) -> Result<()> {
    tch::set_num_threads(1);
    let by_file = WeightsArgs { torchscript: vec![root.join("script.pt")], ..Default::default() };
    let network = NetworkArgs { by_file, ..Default::default() }.open(&common(), PeerChoice::Best)?.remove(0);
    let mut extractor = network.extractor(&common())?;
    let side = network.meta.image_size.min(64);
    extractor.extract(&Tensor::zeros([2, 3, side, side], (Type::Float, Device::Cpu)), false).map(drop)
}

pub fn train_with_frozen(root: &Path, _: &str) -> Result<()> {
    tch::set_num_threads(1);
    let stop = AtomicBool::new(false);
    let mut recipe = Recipe::read(&root.join("recipe.toml"), &[], &methods::names())?;
    // What a number asks for may take long: the recipe is a kind of its own.
    recipe.train.epochs = recipe.train.epochs.min(1);
    train::run(Job { recipe, out: root.join("out/run"), resume: false, ..job(root, &stop)? }).map(drop)
}

const KEPT: &str = "knn --dataset cifar10 --data set --weights good.safetensors --out out --k 1,3 --threads 1 --quiet";

/// Measures with what is in the cache. What it prints is not for the one who watches this process.
pub fn measure_kept(root: &Path, _: &str) -> Result<()> {
    let knn = measures::MEASURES.iter().find(|m| m.name == "knn").unwrap();
    let line = KEPT.replace(" --data set", "").replace(" --threads 1 --quiet", "");
    let at = |word: &str| if word.contains("good.") || word == "out" { root.join(word).display().to_string() } else { word.to_string() };
    let arguments = knn.command().try_get_matches_from(line.split(' ').map(at)).unwrap();
    // SAFETY: this process has no other thread that reads its environment now; the file descriptors are our own.
    unsafe {
        std::env::set_var("MCL_CACHE", root.join("cache"));
        let (out, none) = (libc::dup(1), libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY));
        libc::dup2(none, 1);
        let done = knn.run(&arguments, &Common { data: Some(root.join("set")), ..common() });
        libc::dup2(out, 1);
        libc::close(out);
        libc::close(none);
        done
    }
}

/// What it holds is shown in a report where it is a map, and left out where it is none.
pub fn read_map(root: &Path, file: &str) -> Result<()> {
    let text = String::from_utf8_lossy(&fs::read(root.join(file)).map_err(Error::open(root.join(file)))?).into_owned();
    if let Some(map) = Map::read(&text) {
        let _ = (map.table(), map.file());
    }
    Ok(())
}

// ---- programs ----

/// The programs of this build, or those in the folder that `MCL_HOSTILE_PROGRAMS` names: an older build shows what the harness finds.
pub fn program(path: &str, root: &Path) -> Command {
    let other = std::env::var_os("MCL_HOSTILE_PROGRAMS").map(|folder| PathBuf::from(folder).join(Path::new(path).file_name().unwrap()));
    let mut command = Command::new(other.unwrap_or_else(|| path.into()));
    command.current_dir(root).env("MCL_CACHE", root.join("cache")).env_remove("MCL_DATA").env_remove("MCL_DATA_MIRROR");
    command
}

pub fn train_recipe(root: &Path, _: &str) -> Command {
    let mut command = program(TRAIN, root);
    command.args(["run", "recipe.toml", "--out", "out/run", "--threads", "1", "--device", "cpu", "--quiet"]);
    command
}

pub fn resume_command(root: &Path, _: &str) -> Command {
    let mut command = program(TRAIN, root);
    command.args(["run", "recipe.toml", "--out", "run", "--resume", "--threads", "1", "--device", "cpu", "--quiet"]);
    command
}

pub fn run_protocol(root: &Path, file: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args([measure_of(file), "--dataset", "cifar10", "--data", "set", "--weights", "good.safetensors", "--out", "out"]);
    command.args(["--threads", "1", "--quiet", "--protocol", file]);
    command
}

pub fn embed(root: &Path, file: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args([
        "embed",
        "--weights",
        file,
        "--images",
        "images.safetensors",
        "--out",
        "out/answer.safetensors",
        "--threads",
        "1",
        "--quiet",
    ]);
    if file != "weights.safetensors" {
        command.args(["--arch", "resnet8"]);
    }
    command
}

pub fn embed_images(root: &Path, file: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args([
        "embed",
        "--weights",
        "good.safetensors",
        "--images",
        file,
        "--out",
        "out/answer.safetensors",
        "--threads",
        "1",
        "--quiet",
    ]);
    command
}

pub fn check(root: &Path, below: &str, name: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args(["data", "check", name, "--quiet", "--data"]).arg(root.join(below));
    command
}

/// The program knows the official checksum alone: a damaged archive goes no further than that.
pub fn fetch_command(root: &Path, name: &str) -> Command {
    let mut command = program(EVAL, root);
    let mut content = vec![];
    let _ = fs::File::open(root.join(name)).and_then(|mut f| f.read_to_end(&mut content));
    let set = if name == "set.zip" { "tiny_imagenet" } else { "cifar100" };
    command.args(["data", "fetch", set, "--quiet", "--data", "data", "--mirror", &serve(content)]);
    command
}

pub fn report(root: &Path, _: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args(["report", "--run", "run", "--out", "report", "--quiet"]);
    command
}

pub fn report_plan(root: &Path, _: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args(["evidence", "plan.toml", "--out", "out", "--report-only", "--threads", "1", "--quiet"]);
    command
}

pub fn embed_script(root: &Path, _: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args(["embed", "--torchscript", "script.pt", "--images", "images", "--out", "out/answer.safetensors"]);
    command.args(["--threads", "1", "--quiet"]);
    command
}

pub fn measure_kept_command(root: &Path, _: &str) -> Command {
    let mut command = program(EVAL, root);
    command.args(KEPT.split(' '));
    command
}
