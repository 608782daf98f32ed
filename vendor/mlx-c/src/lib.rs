//! Empty: the manifest beside this only pins a source package.
