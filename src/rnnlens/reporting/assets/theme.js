// The button that switches between light and dark.
function theme() {
  const button = document.querySelector('.theme'), root = document.documentElement;
  const dark = () => root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  const say = () => { button.textContent = dark() ? 'light' : 'dark'; };
  button.addEventListener('click', () => { root.dataset.theme = dark() ? 'light' : 'dark'; say(); });
  button.hidden = false;
  say();
}
