# Sourced by scripts/docs and scripts/check, after use_environment: builds the documentation.

# Builds the site into the folder $1 without network. Fails for a dead link, for an example of the
# API that does not exist, and for a table that is not what scripts/bench/results says.
build_docs() {
  "$PYTHON" scripts/measured_tables.py --check || return
  # Without what the theme says of mkdocs' future in every build.
  NO_MKDOCS_2_WARNING=1 "$PYTHON" -m mkdocs build --quiet --strict \
    --config-file docs/mkdocs.yml --site-dir "$1"
}
