#!/bin/sh
# Print the home of a Java of version 17 or later, which Spark needs; install one where that is possible.
# Looks at JAVA_HOME, the PATH and the usual folders; installs as root, where sudo asks no password, or by Homebrew.
set -eu

WANTED=17
LINUX="/usr/lib/jvm/*"
MACOS="/opt/homebrew/opt/openjdk* /usr/local/opt/openjdk* /Library/Java/JavaVirtualMachines/*/Contents/Home"
JVM_FOLDERS="${JVM_FOLDERS:-$LINUX $MACOS}"

# home_of JAVA: print the home of that program if it runs and is new enough.
home_of() {
    properties=$("$1" -XshowSettings:properties -version 2>&1) || return 1
    version=$(printf '%s\n' "$properties" | sed -n 's/^ *java\.specification\.version = //p')
    home=$(printf '%s\n' "$properties" | sed -n 's/^ *java\.home = //p')
    case "$version" in
        '' | *[!0-9]*) return 1 ;;  # 1.8 and the like
    esac
    [ "$version" -ge "$WANTED" ] && [ -n "$home" ] && printf '%s\n' "$home"
}

find_java() {
    if [ -n "${JAVA_HOME:-}" ] && home_of "$JAVA_HOME/bin/java"; then return 0; fi
    if command -v java >/dev/null 2>&1 && home_of java; then return 0; fi
    for folder in $JVM_FOLDERS; do
        if [ -x "$folder/bin/java" ] && home_of "$folder/bin/java"; then return 0; fi
    done
    return 1
}

# Run a command as root; its output goes to stderr, for stdout carries the answer.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@" >&2; else sudo -n "$@" >&2; fi
}

can_be_root() {
    [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; }
}

install_java() {
    if command -v brew >/dev/null 2>&1; then
        brew install openjdk@17 >&2
        return
    fi
    can_be_root || return 1
    if command -v apt-get >/dev/null 2>&1; then
        as_root apt-get update -qq || true  # the lists at hand may do
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openjdk-17-jre-headless ||
            as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq default-jre-headless
    elif command -v dnf >/dev/null 2>&1; then
        as_root dnf install -y -q java-17-openjdk-headless || as_root dnf install -y -q java-latest-openjdk-headless
    elif command -v yum >/dev/null 2>&1; then
        as_root yum install -y -q java-17-openjdk-headless
    elif command -v apk >/dev/null 2>&1; then
        as_root apk add --quiet openjdk17-jre-headless bash  # Spark's scripts are bash
    else
        return 1
    fi
}

if find_java; then exit 0; fi
echo "Java $WANTED or later is missing; trying to install it." >&2
if install_java && find_java; then exit 0; fi
echo "Spark needs Java $WANTED or later, and none could be found or installed. Install a JRE (on Debian and Ubuntu:" \
    "sudo apt-get install openjdk-17-jre-headless), or point JAVA_HOME to one, and run make again." >&2
exit 1
