//! Preset files that are compiled into the program.

/// Lists the files `presets/FOLDER/NAME.yaml`, each as its path below `presets` and its text.
macro_rules! embedded {
    ($folder:literal, [$($name:literal),* $(,)?]) => {
        &[$((
            concat!($folder, "/", $name, ".yaml"),
            include_str!(concat!("../presets/", $folder, "/", $name, ".yaml")),
        )),*]
    };
}

pub(crate) use embedded;
