//! The whole objective and its gradients against PyTorch, as `mcl-eval selftest` does it, and that the selftest can fail.

use mcl::commands::selftest;
use mcl::eval::Common;
use tch::Device;

const COMMON: Common = Common { data: None, device: Device::Cpu, threads: 1, json: true, quiet: true, commit: "test", id: None };

#[test]
fn objective_gradients_and_hypergradient_agree_with_pytorch() {
    tch::set_num_threads(1);
    let checks = selftest::all(None, Device::Cpu).unwrap();
    let terms: std::collections::BTreeSet<&str> = checks.iter().map(|c| c.term.as_str()).collect();
    for term in [
        "task",
        "task_gate",
        "ens",
        "vcl",
        "icl",
        "soft_vcl",
        "soft_icl",
        "total",
        "lambda",
        "gradient of feats",
        "gradient of logits",
        "mcl soft_icl",
        "memory soft_vcl",
    ] {
        assert!(terms.contains(term), "{term} was not checked: {terms:?}");
    }
    let bad: Vec<_> = checks.iter().filter(|c| !c.passed()).collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn a_wrong_golden_value_is_found() {
    tch::set_num_threads(1);
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/objective_m2_l3_b6.safetensors")).unwrap();
    // One f64 of expected.paper.l_mcl.vcl moves by two percent.
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = 8 + header + json["expected.paper.l_mcl.vcl"]["data_offsets"][0].as_u64().unwrap() as usize;
    let value = f64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    bytes[at..at + 8].copy_from_slice(&(value * 1.02).to_le_bytes());
    std::fs::write(dir.path().join("moved.safetensors"), &bytes).unwrap();
    let checks = selftest::all(Some(dir.path()), Device::Cpu).unwrap();
    let bad: Vec<(String, String)> = checks.iter().filter(|c| !c.passed()).map(|c| (c.mode.clone(), c.term.clone())).collect();
    assert_eq!(bad, [("paper".to_string(), "vcl".to_string()), ("paper".to_string(), "vcl".to_string())], "in f32 and in f64");
    let arguments = selftest::SelftestArgs { fixtures: Some(dir.path().into()) };
    let error = selftest::run(&arguments, &COMMON).unwrap_err();
    assert_eq!(error.exit_code(), 1);
}

#[test]
fn bad_fixtures_are_the_users_to_mend() {
    let dir = tempfile::tempdir().unwrap();
    let run = || selftest::run(&selftest::SelftestArgs { fixtures: Some(dir.path().into()) }, &COMMON).unwrap_err();
    assert!(run().to_string().contains("holds no golden file"));
    std::fs::write(dir.path().join("x.safetensors"), b"not one").unwrap();
    let error = run();
    assert!(error.to_string().contains("is no safetensors file"), "{error}");
    assert_eq!(error.exit_code(), 2);
}
