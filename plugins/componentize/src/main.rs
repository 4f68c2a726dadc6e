//! The last step of a guest build: wraps a core module, in which wit-bindgen has embedded its
//! world, as a component. It validates what it makes and prints what the component imports and
//! exports, so that an import the platform would refuse is seen at build time.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::{env, fs};

use wit_component::{ComponentEncoder, DecodedWasm};

const USAGE: &str = "usage: componentize MODULE.wasm -o OUT.wasm";

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args_os().skip(1).collect();
    let [module, option, out] = &arguments[..] else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    if option != "-o" {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    }
    match componentize(&module.into(), &out.into()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("componentize: {error}");
            ExitCode::FAILURE
        }
    }
}

fn componentize(module: &PathBuf, out: &PathBuf) -> Result<(), Box<dyn Error>> {
    let core = fs::read(module).map_err(|error| format!("{}: {error}", module.display()))?;
    let component = ComponentEncoder::default()
        .validate(true)
        .module(&core)
        .and_then(ComponentEncoder::encode)
        .map_err(|error| format!("{}: {error:#}", module.display()))?;
    for line in surface(&component)? {
        println!("{line}");
    }
    // A reader of OUT finds the old component or the new one, never half of it.
    let mut unfinished = out.clone().into_os_string();
    unfinished.push(".new");
    fs::write(&unfinished, &component)
        .and_then(|()| fs::rename(&unfinished, out))
        .map_err(|error| format!("{}: {error}", out.display()).into())
}

/// One line for each import and export of a component.
fn surface(component: &[u8]) -> Result<Vec<String>, Box<dyn Error>> {
    let decoded = wit_component::decode(component).map_err(|error| format!("{error:#}"))?;
    let DecodedWasm::Component(resolve, world) = &decoded else {
        return Err("not a component".into());
    };
    let world = &resolve.worlds[*world];
    let imports = world.imports.keys().map(|key| ("import", key));
    let exports = world.exports.keys().map(|key| ("export", key));
    Ok(imports
        .chain(exports)
        .map(|(kind, key)| format!("{kind} {}", resolve.name_world_key(key)))
        .collect())
}
