# bash completion for vllmctl(1). Names are asked of the running supervisor; where it does not run there are none.

_vllmctl() {
    local cur prev word command="" step="" i
    cur=${COMP_WORDS[COMP_CWORD]}
    prev=${COMP_WORDS[COMP_CWORD - 1]}
    local common="--json --quiet --no-color --timeout --system --help"
    local commands="status list watch logs doctor up down sleep wake restart drain reload config"

    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        case ${COMP_WORDS[i - 1]} in
        --timeout | --config | --lines | -n | --level | -l) continue ;;
        esac
        [[ $word == -* ]] && continue
        if [[ -z $command ]]; then
            command=$word
        elif [[ $command == config && -z $step ]]; then
            step=$word
        fi
    done

    case $prev in
    --timeout) return ;;
    --config)
        mapfile -t COMPREPLY < <(compgen -f -X '!*.toml' -- "$cur"; compgen -d -- "$cur")
        compopt -o filenames 2>/dev/null
        return
        ;;
    --level | -l)
        mapfile -t COMPREPLY < <(compgen -W "1 2" -- "$cur")
        return
        ;;
    --lines | -n)
        mapfile -t COMPREPLY < <(compgen -W "all 20 100 1000" -- "$cur")
        return
        ;;
    esac

    local options="" targets=""
    case $command in
    "") options="$commands --version" ;;
    status) targets=yes ;;
    list) options="--names" ;;
    logs) options="--follow --lines --config" targets=yes ;;
    doctor) options="--config" ;;
    up | down | wake | restart | drain) options="--all" targets=yes ;;
    sleep) options="--all --level" targets=yes ;;
    config)
        if [[ -z $step ]]; then
            options="check show schema path"
        else
            options="--config"
        fi
        ;;
    watch | reload) ;;
    *) return ;;
    esac

    if [[ $cur == -* || -z $command || $command == config || -z $targets ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options $common" -- "$cur")
        # Without a dash only words are wanted, where there are any.
        if [[ $cur != -* ]]; then
            local words=()
            for word in "${COMPREPLY[@]}"; do
                [[ $word == -* ]] || words+=("$word")
            done
            COMPREPLY=("${words[@]}")
        fi
        return
    fi

    # A name may hold a colon, and readline breaks words there: complete what is behind it.
    [[ $cur == : ]] && cur=""
    local system=""
    [[ " ${COMP_WORDS[*]} " == *" --system "* ]] && system="--system"
    local names
    names=$(vllmctl list --names --timeout 2 $system 2>/dev/null)
    local IFS=$'\n'
    mapfile -t COMPREPLY < <(compgen -W "$names" -- "$cur")
}

complete -F _vllmctl vllmctl
